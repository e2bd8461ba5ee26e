"""The groups of ranks: neighbors share layers, the others read other data."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_groups: dict[str, tuple[list[int], Any]] = {}


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1
) -> None:
    assert pipeline_model_parallel_size == 1
    n, world = tensor_model_parallel_size, list(range(dist.get_world_size()))
    cuts = {
        "tensor": [world[first : first + n] for first in world[::n]],
        "data": [world[place::n] for place in range(n)],
    }
    for name, groups in cuts.items():
        for ranks in groups:
            made = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                _groups[name] = ranks, made


def model_parallel_is_initialized() -> bool:
    return bool(_groups)


def get_tensor_model_parallel_group() -> Any:
    return _groups["tensor"][1]


def get_tensor_model_parallel_rank() -> int:
    return _groups["tensor"][0].index(dist.get_rank())


def get_tensor_model_parallel_size() -> int:
    return len(_groups["tensor"][0])


def get_data_parallel_group() -> Any:
    return _groups["data"][1]


def get_data_parallel_rank() -> int:
    return _groups["data"][0].index(dist.get_rank())


def get_data_parallel_size() -> int:
    return len(_groups["data"][0])
