"""Sharding by FSDP: full (fsdp), within groups of ranks (hsdp), or none (ddp).

One unit per block. Master weights and optimizer state are float32; with bf16 the blocks compute in
bfloat16, and gradients are reduced in it too unless reduce_precision is fp32. FSDP2 if torch has
it, else FSDP1. Ranks that share layers (training.parallel.tensor) hold parts of one copy, which
FSDP cuts further. Ranks that share rows (training.ops.pieces) are like any others to FSDP: it
averages the gradients of each.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from training import compat, models
from training.config import degrees
from training.config.config import Config, ParallelConfig
from training.errors import RequestError
from training.models import Sizes
from training.models.language import Block, LanguageModel
from training.models.mixtral import Experts
from training.ops.dispatch import hide_from_compiler
from training.ops.pieces import ContextGroup
from training.parallel import float8, fsdp1, memory, tensor
from training.parallel.backend import Backend
from training.parallel.memory import compute_dtype, uses_fsdp2
from training.parallel.offload import HostMemory, Offload
from training.parallel.optimizer import clip_gradients, make_optimizer
from training.process_group import Group, start

if TYPE_CHECKING:
    from training.convert.source import Source


class Fsdp(Backend):
    """FSDP, combined with tensor groups of ranks that share layers."""

    def start(self, config: Config) -> Group:
        parallel, run = config.parallel, config.run
        return start(
            run.device,
            parallel.tensor_parallel,
            context_parallel=parallel.context_parallel,
            cpu_offload=parallel.cpu_offload,
            hang_abort_seconds=run.hang_abort_seconds,
        )

    def check(self, config: Config, group: Group) -> None:
        check(config.parallel, group)
        memory.check_tradeoffs(config, group.device)

    def build(self, config: Config, group: Group, weights: Source | None) -> nn.Module:
        return build(config.model.sizes, config.parallel, group, config.run.seed, weights)

    def optimizer(self, model: nn.Module, config: Config, group: Group) -> torch.optim.Optimizer:
        return make_optimizer(model, config.optim)

    def clip(self, model: nn.Module, optimizer: torch.optim.Optimizer, threshold: float) -> Tensor:
        return clip_gradients(model, threshold)  # ()

    def copier(
        self, config: Config, device: torch.device
    ) -> tuple[Callable[[Any], Any] | None, str]:
        if not uses_fsdp2(config.parallel.fsdp_engine):
            return None, "this is FSDP1"
        return super().copier(config, device)


BACKEND = Fsdp()


def build(
    sizes: Sizes, config: ParallelConfig, group: Group, seed: int, weights: Source | None = None
) -> nn.Module:
    """Build the model, initialized and sharded; every layout starts from the same values.

    These are random ones from the seed, or those of `weights`. With low_cpu_fsdp no rank ever holds
    more than its shards and one whole parameter.
    Raises RequestError if the layout does not fit the ranks or the device.
    """
    mesh, tensor_mesh = meshes(config, group)
    dtype = compute_dtype(config.precision, group.device)
    with torch.device("meta" if config.low_cpu_fsdp else "cpu"):
        model = models.build(sizes)
    if weights is not None:
        model.initial = weights.initial  # type: ignore[method-assign]
    if config.context_parallel > 1:
        model.context_group = context_group(config, group)
    memory.mark_recomputed(model.blocks, config)
    if config.offload_activations:
        host = HostMemory(group.device)
        Offload(host, config.activation_loading_horizon).attach(model.blocks)
    float8.convert(model.blocks, config, group.device, dtype)
    if config.use_torch_compile:
        compile_blocks(model.blocks)
    if not config.low_cpu_fsdp:
        _fill(model, seed)
    if tensor_mesh is not None:
        tensor.split_layers(model, tensor_mesh, group.device)
    if uses_fsdp2(config.fsdp_engine):
        _shard(model, mesh, dtype, config)
        if config.low_cpu_fsdp:
            held = torch.device("cpu") if config.cpu_offload else group.device
            _materialise(model, held, seed)
        return model
    return fsdp1.shard(model, config, mesh, dtype, group.device, seed)


def check(config: ParallelConfig, group: Group) -> None:
    """Raise RequestError if these ranks, or this torch, cannot share layers or the model."""
    found = degrees.world_faults(
        config.tensor_parallel,
        group.world_size,
        compat.fsdp2() is not None,
        config.context_parallel,
    )
    if found:
        raise RequestError.of(found)
    mesh_shape(config, group)


def meshes(config: ParallelConfig, group: Group) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh of copies and shards, and that of the tensor group, if there is one."""
    shape, names = mesh_shape(config, group), ("replicate", "shard")
    if config.tensor_parallel == 1:
        return _mesh(group, shape, names), None
    mesh = _mesh(group, (*shape, config.tensor_parallel), (*names, "tensor"))
    return mesh[names], mesh["tensor"]


def _mesh(group: Group, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    mesh = init_device_mesh(group.device.type, shape, mesh_dim_names=names)
    if group.timeout:
        for dimension in range(len(shape)):
            compat.set_timeout(mesh.get_group(dimension), group.timeout)
    return mesh


def context_group(config: ParallelConfig, group: Group) -> ContextGroup:
    """Create the group of ranks that share rows with this one, from adjacent tensor groups."""
    degree, each = config.context_parallel, config.tensor_parallel
    wide = degree * each
    members = [
        [first + place + each * index for index in range(degree)]
        for first in range(0, group.world_size, wide)
        for place in range(each)
    ]
    mine, _ = dist.new_subgroups_by_enumeration(members, timeout=group.timeout)
    return ContextGroup(group.rank % wide // each, degree, mine)


def mesh_shape(config: ParallelConfig, group: Group) -> tuple[int, int]:
    """Return (copies of the model, tensor groups that share one)."""
    groups = group.world_size // config.tensor_parallel  # including those that share rows
    if config.sharding_strategy == "ddp":
        return groups, 1
    if config.sharding_strategy == "fsdp":
        return 1, groups
    shared = config.shard_group_size or group.local_world_size
    if found := degrees.copy_faults(group.world_size, shared):
        raise RequestError.of(found)
    if shared % config.tensor_parallel:
        raise RequestError(
            f"shard_group_size: {shared} ranks are not whole tensor groups of "
            f"{config.tensor_parallel}"
        )
    return group.world_size // shared, shared // config.tensor_parallel


def _shard(
    model: LanguageModel, mesh: DeviceMesh, dtype: torch.dtype, config: ParallelConfig
) -> None:
    # A one-dimensional mesh is FSDP, a two-dimensional one HSDP, or DDP with shard groups of one.
    wanted = mesh["shard"] if mesh.size(0) == 1 else mesh
    options: dict[str, Any] = {"mesh": wanted}
    if dtype != torch.float32:
        # The residual stream stays float32 from block to block, so inputs are not cast.
        options["mp_policy"] = compat.fsdp2().MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=fsdp1.reduce_dtype(config.reduce_precision, dtype),
            cast_forward_inputs=False,
        )
    placed = expert_placements(model, ranks=mesh.size(1))
    if placed:
        options["shard_placement_fn"] = placed.get
    if config.cpu_offload:
        options["offload_policy"] = compat.fsdp2().CPUOffloadPolicy()
    reshard = config.reshard_after_forward
    for block in model.blocks:
        compat.fsdp2().fully_shard(block, reshard_after_forward=reshard, **options)
    compat.fsdp2().fully_shard(model, **options)
    if config.forward_prefetch:
        sharded: list[Any] = model.blocks
        for block, after in pairwise(sharded):
            block.set_modules_to_forward_prefetch([after])


def _fill(model: LanguageModel, seed: int) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial(name, parameter.shape, seed))  # the parameter's shape


def _materialise(model: LanguageModel, device: torch.device, seed: int) -> None:
    """Replace every sharded parameter on the meta device with this rank's part of its value."""
    parameters: list[tuple[str, Any]] = list(model.named_parameters())
    for name, meta in parameters:
        whole = model.initial(name, meta.shape, seed)  # the parameter's shape
        part = _local_part(whole, meta)  # this rank's part
        local = part.to(device, torch.float32, copy=True)  # this rank's part
        value = compat.DTensor.from_local(
            local,
            meta.device_mesh,
            meta.placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        model.put(name, nn.Parameter(value))


def _local_part(whole: Tensor, like: Any) -> Tensor:
    """Return this rank's part of a parameter: cut by the tensor group first, then by FSDP."""
    for axis, placement in reversed(list(enumerate(like.placements))):
        if hasattr(placement, "dim"):
            parts = whole.chunk(like.device_mesh.size(axis), placement.dim)  # (..., its part, ...)
            mine = like.device_mesh.get_local_rank(axis)
            none = whole.narrow(placement.dim, 0, 0)  # (..., 0, ...)
            whole = parts[mine] if mine < len(parts) else none
    return whole


def compile_blocks(blocks: Iterable[Block]) -> None:
    """Compile each block except its operations, whose loops over chunks would be unrolled.

    Raises RequestError if there is no C++ compiler, which torch.compile needs on every device.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise RequestError(
            f"use_torch_compile: needs a C++ compiler, but {compiler} is not on PATH; "
            "fix: install g++, name another by CXX, or leave the flag out"
        )
    hide_from_compiler()
    for block in blocks:
        block.inner = torch.compile(block.inner)  # type: ignore[method-assign]


def expert_placements(model: nn.Module, ranks: int) -> dict[nn.Parameter, Any]:
    """Return which parameters of experts to cut within each expert, and how.

    These are the ones whose experts the ranks cannot share evenly. They are cut in a dimension that
    the ranks can share evenly, preferably one that the tensor group has not cut. Without such a
    dimension, they are cut by experts after all.
    """
    found = {}
    for module in model.modules():
        for parameter in module.parameters() if isinstance(module, Experts) else ():
            fitting = [
                dim
                for dim in sorted((1, 2), key=lambda dim: dim in _cut_dimensions(parameter))
                if _local_tensor(parameter).shape[dim] % ranks == 0
            ]
            if parameter.shape[0] % ranks and fitting:
                found[parameter] = compat.Shard(fitting[0])
    return found


def _local_tensor(parameter: Any) -> Any:
    """Return the part of a parameter that the tensor group leaves to FSDP."""
    return parameter.to_local() if isinstance(parameter, compat.DTensor) else parameter


def _cut_dimensions(parameter: Any) -> list[int]:
    """List the dimensions that the tensor group has cut."""
    placed = parameter.placements if isinstance(parameter, compat.DTensor) else ()
    return [one.dim for one in placed if isinstance(one, compat.Shard)]
