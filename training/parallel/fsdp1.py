"""FSDP1 (FullyShardedDataParallel), for torch before 2.4: the same layouts, the same values."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from training.config.config import ParallelConfig
from training.models.language import Block, LanguageModel


def shard(
    model: LanguageModel,
    config: ParallelConfig,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> nn.Module:
    """Wrap the model, giving parameters on the meta device their initial values."""
    names = {module: name for name, module in model.named_modules()}
    made: dict[str, nn.Parameter] = {}  # tied parameters must stay one

    def materialise(module: nn.Module) -> None:
        for attribute, meta in list(module.named_parameters(recurse=False)):
            name = f"{names[module]}.{attribute}"
            name = model.tied.get(name, name)
            if name not in made:
                value = model.initial(name, meta.shape, seed)  # the parameter's shape
                made[name] = nn.Parameter(value.to(device, torch.float32, copy=True))
            module.register_parameter(attribute, made[name])

    precision = MixedPrecision(
        param_dtype=dtype,
        reduce_dtype=reduce_dtype(config.reduce_precision, dtype),
        buffer_dtype=dtype,
        cast_forward_inputs=False,
        cast_root_forward_inputs=False,
    )
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=_strategy(mesh, config.reshard_after_forward),
        mixed_precision=None if dtype == torch.float32 else precision,
        device_mesh=mesh if _is_hybrid(mesh) else None,
        device_id=device,
        cpu_offload=CPUOffload(offload_params=True) if config.cpu_offload else None,
        forward_prefetch=config.forward_prefetch,
        backward_prefetch=BACKWARD[config.backward_prefetch],
        limit_all_gathers=config.limit_all_gathers,
        param_init_fn=materialise if next(model.parameters()).is_meta else None,
        use_orig_params=True,
    )


BACKWARD = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST}
STRATEGIES = {
    (True, True): ShardingStrategy.HYBRID_SHARD,
    (True, False): ShardingStrategy._HYBRID_SHARD_ZERO2,
    (False, True): ShardingStrategy.FULL_SHARD,
    (False, False): ShardingStrategy.SHARD_GRAD_OP,
}
"""Whether it is hybrid, and whether weights are freed after the forward pass -> strategy."""


def _strategy(mesh: DeviceMesh, reshard: bool) -> ShardingStrategy:
    """Choose by the mesh: hybrid sharding in groups of one rank would not sum their gradients."""
    if mesh.size(1) == 1:
        return ShardingStrategy.NO_SHARD
    return STRATEGIES[_is_hybrid(mesh), reshard]


def _is_hybrid(mesh: DeviceMesh) -> bool:
    return mesh.size(0) > 1 and mesh.size(1) > 1


def reduce_dtype(reduce_precision: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which ranks sum gradients; auto is the one that blocks compute in."""
    return {"auto": dtype, "bf16": torch.bfloat16, "fp32": torch.float32}[reduce_precision]
