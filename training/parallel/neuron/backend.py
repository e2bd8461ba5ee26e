"""The Neuron backend: tensor groups of plain tensors, and ZeRO-1 (see the package)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from training import compat, models
from training.config import degrees
from training.config.config import Config
from training.errors import RequestError
from training.models.sizes import Mamba2Config
from training.ops.dispatch import absent
from training.ops.nki.limits import CHUNK, PARTITIONS, STATE
from training.ops.nki.torch_ops import NKI
from training.parallel import memory
from training.parallel.backend import Backend
from training.parallel.neuron import device, nxd
from training.parallel.neuron.layers import Layers
from training.parallel.neuron.model import NeuronMamba2
from training.parallel.neuron.optimizer import MasterAdamW, copied
from training.parallel.neuron.places import Place, place
from training.parallel.share import Share
from training.process_group import Group

if TYPE_CHECKING:
    from training.convert.source import Source

NARROW = ("weight", "bias")
"""Parameters that become bfloat16; A_log, D and dt_bias, one number per head, stay float32."""


class Ranks:
    """What the optimizer needs besides the model: this rank's groups and its parameters' places."""

    def __init__(self, tensor: Share, data: Share) -> None:
        self.tensor, self.data = tensor, data
        self.places: dict[str, tuple[Place, torch.Size]] = {}


class Neuron(Backend):
    """Tensor groups of plain tensors; AdamW with master weights, sharded or not."""

    def start(self, config: Config) -> Group:
        run = config.run
        return device.start(run.device, config.parallel.tensor_parallel, run.hang_abort_seconds)

    def check(self, config: Config, group: Group) -> None:
        parallel = config.parallel
        found = degrees.world_faults(parallel.tensor_parallel, group.world_size, True)
        if not compat.saves_boxes():
            found.append(
                f"backend: neuron needs torch 2.5 or later, but this is {torch.__version__}"
            )
        if group.device.type == "xla" and not absent(NKI):
            found += _kernel_faults(config)
        if found:
            raise RequestError.of(found)

    def build(self, config: Config, group: Group, weights: Source | None) -> nn.Module:
        sizes = config.model.sizes
        assert isinstance(sizes, Mamba2Config)
        ranks = Ranks(*device.shares(group))
        layers = (nxd.NxdLayers if device.uses_nxd(group) else Layers)(ranks.tensor)
        with torch.device("meta"):
            whole, model = models.build(sizes), NeuronMamba2(sizes, layers)
        if weights is not None:
            whole.initial = weights.initial  # type: ignore[method-assign]
        narrow = torch.bfloat16 if config.parallel.precision == "bf16" else torch.float32
        shapes = {name: one.shape for name, one in whole.named_parameters()}
        for name, _ in list(model.named_parameters()):
            lies = place(name, sizes, ranks.tensor)
            ranks.places[name] = lies, shapes[lies.name]
            first = whole.initial(lies.name, shapes[lies.name], config.run.seed)
            dtype = narrow if name.rpartition(".")[2] in NARROW else torch.float32
            part = lies.of(first).to(group.device, dtype, copy=True)  # this rank's part
            model.put(name, nn.Parameter(part))
        memory.mark_recomputed(model.blocks, config.parallel)
        model.ranks = ranks  # type: ignore[assignment]
        return model

    def optimizer(self, model: nn.Module, config: Config, group: Group) -> torch.optim.Optimizer:
        ranks: Any = model.ranks
        return MasterAdamW(
            model,
            ranks.places,
            config.optim,
            ranks.tensor,
            ranks.data,
            zero1=config.parallel.zero1,
            wide=config.parallel.master_weights,
        )

    def clip(self, model: nn.Module, optimizer: torch.optim.Optimizer, threshold: float) -> Tensor:
        assert isinstance(optimizer, MasterAdamW)
        return optimizer.clip(threshold)  # ()

    def mark(self, group: Group) -> None:
        if group.device.type == "xla":
            device.mark_step()

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        assert isinstance(optimizer, MasterAdamW)
        return optimizer.checkpointed()

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        assert isinstance(optimizer, MasterAdamW)
        optimizer.restore(state)

    def copier(
        self, config: Config, device: torch.device
    ) -> tuple[Callable[[Any], Any] | None, str]:
        return copied, ""


BACKEND = Neuron()


def _kernel_faults(config: Config) -> list[str]:
    """List why the kernels of training.ops.nki, which run on Neuron devices, cannot run it."""
    sizes, found = config.model.sizes, []
    assert isinstance(sizes, Mamba2Config)
    if config.data.seq_length % CHUNK:
        found.append(
            f"seq_length: the kernels take multiples of {CHUNK}, not {config.data.seq_length}"
        )
    if sizes.d_state != STATE:
        found.append(f"d_state: the kernels take {STATE}, not {sizes.d_state}")
    if sizes.head_dim > PARTITIONS:
        found.append(f"head_dim: the kernels take {PARTITIONS} at most, not {sizes.head_dim}")
    if sizes.d_conv_in // config.parallel.tensor_parallel % PARTITIONS:
        found.append(
            f"d_model: a rank has {sizes.d_conv_in // config.parallel.tensor_parallel} channels of "
            f"the convolution; the kernels take multiples of {PARTITIONS}"
        )
    return found
