"""FSDP1 (FullyShardedDataParallel), for torch before 2.4: the same layouts, the same values."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from training.models.language import Block, LanguageModel

_STRATEGIES = {
    "fsdp": ShardingStrategy.FULL_SHARD,
    "hsdp": ShardingStrategy.HYBRID_SHARD,
    "ddp": ShardingStrategy.NO_SHARD,
}


def shard(
    model: LanguageModel,
    strategy: str,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> nn.Module:
    """Wrap the model; parameters on the meta device get their initial values on the way."""
    names = {module: name for name, module in model.named_modules()}
    made: dict[str, nn.Parameter] = {}  # a tied parameter must stay one

    def materialise(module: nn.Module) -> None:
        for attribute, meta in list(module.named_parameters(recurse=False)):
            name = f"{names[module]}.{attribute}"
            name = model.tied.get(name, name)
            if name not in made:
                value = model.initial(name, meta.shape, seed).to(device)  # the parameter's shape
                made[name] = nn.Parameter(value)
            module.register_parameter(attribute, made[name])

    precision = MixedPrecision(
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        buffer_dtype=dtype,
        cast_forward_inputs=False,
        cast_root_forward_inputs=False,
    )
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=_STRATEGIES[strategy],
        mixed_precision=None if dtype == torch.float32 else precision,
        device_mesh=mesh if strategy == "hsdp" else None,
        device_id=device,
        param_init_fn=materialise if next(model.parameters()).is_meta else None,
        use_orig_params=True,
    )
