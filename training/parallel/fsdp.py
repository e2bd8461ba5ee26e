"""Sharding by FSDP: full (fsdp), within groups of ranks (hsdp), or none (ddp).

One unit a block. Master weights and optimizer state are float32; with bf16 the blocks compute in
bfloat16, and gradients are reduced in it too unless reduce_precision is fp32. FSDP2 where torch has
it, else FSDP1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from training import compat, models
from training.config import ParallelConfig
from training.errors import RequestError
from training.initial import start_from
from training.models import Sizes
from training.models.language import LanguageModel
from training.parallel import fsdp1, recompute
from training.parallel.compiled import compile_blocks
from training.parallel.group import Group
from training.parallel.offload import HostMemory, Offload

if TYPE_CHECKING:
    from training.convert.source import Source


def build(
    sizes: Sizes, config: ParallelConfig, group: Group, seed: int, weights: Source | None = None
) -> nn.Module:
    """Make the model, initialised and sharded; every layout starts from the same values.

    These are random ones of the seed, or those of `weights`. With low_cpu_fsdp no rank ever holds
    more than its shards and one whole parameter.
    Raises RequestError if the layout does not fit the ranks or the device.
    """
    mesh = init_device_mesh(
        group.device.type, mesh_shape(config, group), mesh_dim_names=("replicate", "shard")
    )
    dtype = compute_dtype(config.precision, group.device)
    with torch.device("meta" if config.low_cpu_fsdp else "cpu"):
        model = models.build(sizes)
    if weights is not None:
        start_from(weights, model)
    recompute.mark(model.blocks, config)
    if config.offload_activations:
        memory = HostMemory(group.device)
        Offload(memory, config.activation_loading_horizon).attach(model.blocks)
    if config.use_torch_compile:
        compile_blocks(model.blocks)
    if not config.low_cpu_fsdp:
        _fill(model, seed)
    if uses_fsdp2(config.fsdp_engine):
        _shard(model, mesh, dtype, config)
        if config.low_cpu_fsdp:
            held = torch.device("cpu") if config.cpu_offload else group.device
            _materialise(model, held, seed)
        return model
    return fsdp1.shard(model, config, mesh, dtype, group.device, seed)


def uses_fsdp2(engine: str) -> bool:
    """Choose the engine; RequestError if FSDP2 is asked for and this torch has none."""
    if engine == "fsdp2" and compat.fsdp2() is None:
        raise RequestError(f"fsdp_engine: torch {torch.__version__} has no FSDP2; use auto")
    return engine != "fsdp1" and compat.fsdp2() is not None


def mesh_shape(config: ParallelConfig, group: Group) -> tuple[int, int]:
    """Give (copies of the model, ranks that share one); their product is the world size."""
    if config.sharding_strategy == "ddp":
        return group.world_size, 1
    if config.sharding_strategy == "fsdp":
        return 1, group.world_size
    shared = config.shard_group_size or group.local_world_size
    if group.world_size % shared:
        raise RequestError(
            f"shard_group_size: {group.world_size} ranks cannot be cut into groups of {shared}"
        )
    return group.world_size // shared, shared


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Choose bfloat16 or float32; auto is bfloat16 on a GPU that has it."""
    has_bf16 = device.type == "cpu" or torch.cuda.is_bf16_supported()
    if precision == "bf16" and not has_bf16:
        raise RequestError("precision: this GPU has no bfloat16; use precision=fp32")
    wanted = precision == "bf16" or (precision == "auto" and device.type == "cuda" and has_bf16)
    return torch.bfloat16 if wanted else torch.float32


def _shard(
    model: LanguageModel, mesh: DeviceMesh, dtype: torch.dtype, config: ParallelConfig
) -> None:
    # A mesh of one dimension is plain FSDP; of two, HSDP, whose shard group of one is DDP.
    wanted = mesh["shard"] if mesh.size(0) == 1 else mesh
    options: dict[str, Any] = {"mesh": wanted}
    if dtype != torch.float32:
        # The residual stream stays float32 from block to block, so inputs are not cast.
        options["mp_policy"] = compat.fsdp2().MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=fsdp1.reduce_dtype(config.reduce_precision, dtype),
            cast_forward_inputs=False,
        )
    if config.cpu_offload:
        options["offload_policy"] = compat.fsdp2().CPUOffloadPolicy()
    for block in model.blocks:
        compat.fsdp2().fully_shard(block, **options)
    compat.fsdp2().fully_shard(model, **options)


def _fill(model: LanguageModel, seed: int) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial(name, parameter.shape, seed))  # the parameter's shape


def _materialise(model: LanguageModel, device: torch.device, seed: int) -> None:
    """Replace every sharded parameter on the meta device by this rank's part of its value."""
    parameters: list[tuple[str, Any]] = list(model.named_parameters())
    for name, meta in parameters:
        whole = model.initial(name, meta.shape, seed)  # the parameter's shape
        part = _local_part(whole, meta)  # (its first size / ranks, ...)
        local = part.to(device, torch.float32, copy=True)  # (its first size / ranks, ...)
        value = compat.DTensor.from_local(
            local,
            meta.device_mesh,
            meta.placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        parameter = nn.Parameter(value)
        for module, attribute in _holders(model, name):
            module.register_parameter(attribute, parameter)


def _local_part(whole: Tensor, like: Any) -> Tensor:
    for axis, placement in enumerate(like.placements):
        if placement.is_shard():
            parts = whole.chunk(like.device_mesh.size(axis), dim=0)  # (its first size / ranks, ...)
            mine = like.device_mesh.get_local_rank(axis)
            whole = parts[mine] if mine < len(parts) else whole[:0]
    return whole


def _holders(model: LanguageModel, name: str) -> Iterator[tuple[nn.Module, str]]:
    """Every place of the model that a parameter has, tied names included."""
    for alias in (name, *(second for second, first in model.tied.items() if first == name)):
        owner, _, attribute = alias.rpartition(".")
        yield model.get_submodule(owner), attribute
