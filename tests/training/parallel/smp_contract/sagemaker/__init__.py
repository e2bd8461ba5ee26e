"""Stands in for torch.sagemaker: see the folder above."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

CALLS: list[dict[str, Any]] = []
"""How this rank has called the interface, in order."""

LEAST = {
    "hybrid_shard_degree": 0,
    "activation_loading_horizon": 1,
    "tensor_parallel_degree": 1,
    "context_parallel_degree": 1,
    "expert_parallel_degree": 1,
    "random_seed": 0,
}
SWITCHES = ("sm_activation_offloading", "fsdp_cache_flush_warnings", "allow_empty_shards")
state: Any = SimpleNamespace()


def init(config: str | dict[str, Any] | None = None) -> None:
    """Check the configuration against the reference; the ranks must have met before."""
    assert dist.is_initialized() and not is_initialized()
    assert isinstance(config, dict)
    for name, value in config.items():
        if name in SWITCHES:
            assert type(value) is bool, name
        else:
            assert type(value) is int and value >= LEAST[name], name
    ranks, world = config.get("tensor_parallel_degree", 1), dist.get_world_size()
    assert config.get("hybrid_shard_degree", 0) <= world and world % ranks == 0
    found = {
        "rank": dist.get_rank(),
        "world_size": world,
        "tp_size": ranks,
        "tensor_parallel_degree": ranks,
        "tp_rank": dist.get_rank() % ranks,
        "hybrid_shard_degree": config.get("hybrid_shard_degree", 0),
        "world_process_group": dist.group.WORLD,
    }
    vars(state).update(found)
    CALLS.append({"call": "init", "config": config})


def is_initialized() -> bool:
    return bool(vars(state))


def transform(
    model: nn.Module,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    config: dict[str, Any] | None = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str = "p2p",
) -> nn.Module:
    """Accept a transformers model; rank 0 must have the values to be loaded."""
    assert is_initialized()
    meta = [one.is_meta for one in model.parameters()]
    assert not (load_state_dict_from_rank0 and state.rank == 0 and any(meta))
    CALLS.append({"call": "transform", "load_state_dict_from_rank0": load_state_dict_from_rank0})
    return model
