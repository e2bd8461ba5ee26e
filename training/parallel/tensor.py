"""Tensor parallelism: the ranks of a tensor group share the work of each layer.

Every parameter becomes a DTensor of the tensor group, cut or on every rank, before FSDP cuts what
each rank then has. So FSDP, gradient clipping and checkpoints see one model whatever the degree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from training import compat
from training.models.language import LanguageModel
from training.models.llama import MLP, Attention
from training.models.mamba2 import Mamba2Mixer
from training.models.mixtral import Experts
from training.parallel.layers import RowLinear, SharedAttention, SharedExperts, SharedMLP
from training.parallel.share import Share, Shared
from training.parallel.tensor_mixer import GatheredLinear, SharedMixer

_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROW = ("o_proj", "down_proj", "out_proj")
_EXPERTS = {"w1": 1, "w2": 2, "w3": 1}
_LAYERS: dict[type[nn.Module], type[Shared]] = {
    Attention: SharedAttention,
    MLP: SharedMLP,
    Experts: SharedExperts,
    Mamba2Mixer: SharedMixer,
}


def split(model: LanguageModel, mesh: DeviceMesh, device: torch.device) -> None:
    """Let the ranks of a mesh of one dimension share the layers; in place.

    Parameters on the meta device stay there, all others go to the device of the group.
    """
    share = Share(mesh.get_local_rank(), mesh.size(), mesh.get_group())
    for name, parameter in list(model.named_parameters()):
        model.put(name, nn.Parameter(_distributed(parameter.detach(), cut(name), mesh, device)))
    for name, module in list(model.named_modules()):
        if type(module) in _LAYERS or next(module.parameters(recurse=False), None) is not None:
            module.__class__ = _shared_class(name, type(module))
            module.share = share  # type: ignore[assignment]


def cut(name: str) -> int | None:
    """Tell which dimension of a parameter is cut; None where every rank has it whole."""
    owner, _, kind = name.rpartition(".")
    module = owner.rpartition(".")[2]
    if module in _COLUMN:
        return 0
    if kind == "weight" and module in (*_ROW, "in_proj"):
        return 1
    return _EXPERTS.get(kind)


def _distributed(whole: Tensor, dim: int | None, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """Make the DTensor of a parameter, from this rank's part of it."""
    local = whole
    if dim is not None:
        local = whole.chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()  # its part
    value: Any = compat.DTensor.from_local(
        local if whole.is_meta else local.to(device),
        mesh,
        [compat.Replicate() if dim is None else compat.Shard(dim)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return value  # the shape of the whole


def _shared_class(name: str, plain: type[nn.Module]) -> type[nn.Module]:
    """Find or make the class that stands in for a plain one; it has no state of its own."""
    if plain in _LAYERS:
        return _LAYERS[plain]
    last = name.rpartition(".")[2]
    if last in _ROW:
        return RowLinear
    if last == "in_proj":
        return GatheredLinear
    return type(plain.__name__, (Shared, plain), {})
