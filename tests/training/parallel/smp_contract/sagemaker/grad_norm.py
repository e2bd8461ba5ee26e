"""Stands in for torch.sagemaker.grad_norm: see the folder above."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.sagemaker import CALLS


def clip_grad_norm_(
    model: FullyShardedDataParallel, max_norm: float, norm_type: float = 2.0
) -> Tensor:
    assert isinstance(model, FullyShardedDataParallel)
    CALLS.append({"call": "clip_grad_norm_", "max_norm": max_norm})
    return model.clip_grad_norm_(max_norm, norm_type)  # ()
