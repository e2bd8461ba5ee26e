"""The loss for logits that are split by the vocabulary."""

from __future__ import annotations

import torch
import torch.distributed as dist
from neuronx_distributed.parallel_layers import mappings
from torch import Tensor


def parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Maps (..., own words), (...) to the loss of each position, (...)."""
    assert label_smoothing == 0 and target.min() >= 0
    share = mappings.share()
    own = vocab_parallel_logits.shape[-1]
    most = share.sum(vocab_parallel_logits.detach().amax(-1), dist.ReduceOp.MAX)
    logits = vocab_parallel_logits - most[..., None]
    local = target - share.rank * own
    is_own = (local >= 0) & (local < own)
    picked = logits.gather(-1, local.clamp(0, own - 1)[..., None])[..., 0] * is_own
    norm = share.leave(logits.exp().sum(-1))
    return torch.log(norm) - share.leave(picked)
