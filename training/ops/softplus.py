"""Softplus, log(1 + e^x), written out for Neuron, and its derivative, the sigmoid."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

NEURON = "xla"
"""Device type of Neuron."""


def softplus(x: Tensor) -> Tensor:
    """Compute softplus of x, of any shape.

    On XLA devices it is composed of other operations: AWS's Mamba-2 for Neuron found that the
    device computed F.softplus as the identity function. Elsewhere the single kernel is faster.
    """
    if x.device.type == NEURON:
        y: Tensor = _Softplus.apply(x)
        return y
    return F.softplus(x)


class _Softplus(torch.autograd.Function):
    """max(x, 0) + log(1 + e^-|x|), which overflows for no x.

    The derivative is written out, since those of max and |x| are wrong at 0.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return dy * torch.sigmoid(x)
