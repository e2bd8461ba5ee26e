"""Passing tensors between the ranks that share layers."""

from __future__ import annotations

from neuronx_distributed.parallel_layers import parallel_state as state
from torch import Tensor

from training.parallel.share import Share


def share() -> Share:
    """Return the tensor group (not a function of the library)."""
    return Share(
        state.get_tensor_model_parallel_rank(),
        state.get_tensor_model_parallel_size(),
        state.get_tensor_model_parallel_group(),
    )


def copy_to_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    return share().enter(input_)[0]


def reduce_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    return share().leave(input_)
