"""Root mean square normalisation (Zhang & Sennrich 2019), float32 inside."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the result has the weight's dtype.

    The input may be wider than the weight (a float32 residual stream, bfloat16 weights).
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))  # (size,)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # (..., size)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)  # (..., 1)
        return (wide * scale * self.weight).to(self.weight.dtype)  # (..., size)
