"""Root mean square normalization (Zhang & Sennrich 2019), computed in float32."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from training.ops.dispatch import Choice, Implementation, absent, on_gpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / rms(x) * weight over the last dimension; the result has the weight's dtype.

    x (..., m) may be wider than the weight (m): a float32 residual stream, bfloat16 weights.
    """
    y: Tensor = CHOICE(x)(x, weight, eps)  # (..., m)
    return y


class RMSNorm(nn.Module):
    """`rms_norm` with its weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))  # (m,)

    def forward(self, x: Tensor) -> Tensor:
        """(..., m) -> (..., m)."""
        return rms_norm(x, self.weight, self.eps)  # (..., m)


class _Norm(torch.autograd.Function):
    """Saves the input, which the residual stream holds anyway, and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # (..., m)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # (..., 1)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(weight.dtype)  # (..., m)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        normal = x.to(scale.dtype) * scale  # (..., m)
        dy = dy.to(scale.dtype)  # (..., m)
        dweight = (dy * normal).flatten(0, -2).sum(0).to(weight.dtype)  # (m,)
        dnormal = dy * weight  # (..., m)
        along = (dnormal * normal).mean(-1, keepdim=True)  # (..., 1)
        dx = dnormal.sub_(normal.mul_(along)).mul_(scale)  # (..., m)
        return dx.to(x.dtype), dweight, None


_MODULES = ("mamba_ssm.ops.triton.layer_norm", "mamba_ssm.ops.triton.layernorm")
"""The module in version 2 of mamba-ssm, and in version 1."""


def _unfit(like: Tensor) -> str:
    """Return why a tensor does not fit: it is not on a GPU, or mamba-ssm's norms are missing."""
    return on_gpu(like) or ("" if any(not absent(m) for m in _MODULES) else absent(_MODULES[0]))


def _fast(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """mamba-ssm's Triton kernel; its result has x's dtype, and is converted to the weight's."""
    module = importlib.import_module(next(one for one in _MODULES if not absent(one)))
    y: Tensor = module.rms_norm_fn(x, weight, None, eps=eps)  # (..., m)
    return y.to(weight.dtype)  # (..., m)


CHOICE = Choice(
    "rms_norm",
    [
        Implementation(name="mamba-ssm", run=_fast, unfit=_unfit),
        Implementation(name="torch", run=_Norm.apply),
    ],
)
