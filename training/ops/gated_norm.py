"""Gated root mean square normalization of Mamba-2, computed in float32.

    t = x * silu(z)        y = weight * t / sqrt(mean(t ** 2) + eps)

The mean is over a group of adjacent channels, or all channels if there is one group (Dao & Gu
2024, sections 7.1 and 8.1).

Shapes: d channels, g groups, s = d / g channels of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from training.ops.dispatch import Choice, Implementation, on_gpu

Mean = Callable[[Tensor], Tensor]


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float, mean: Mean | None = None
) -> Tensor:
    """Compute y (..., d) for x and z (..., d) and weight (d); y has the dtype of x.

    `groups` must divide d. If other ranks hold more channels of the groups, `mean` combines this
    rank's means (..., g, 1) with theirs, in the forward and the backward pass.
    """
    if mean is not None:  # the kernels do not support several ranks
        return _Norm.apply(x, z, weight, groups, eps, mean)  # (..., d)
    y: Tensor = CHOICE(x)(x, z, weight, groups, eps)  # (..., d)
    return y


class GatedRMSNorm(nn.Module):
    """`gated_rms_norm` with its weight."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(size))  # (d,)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """(..., d), (..., d) -> (..., d)."""
        return gated_rms_norm(x, z, self.weight, self.groups, self.eps)  # (..., d)


class _Norm(torch.autograd.Function):
    """Saves the inputs, and one number per group of a row."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        z: Tensor,
        weight: Tensor,
        groups: int,
        eps: float,
        mean: Mean = lambda own: own,
    ) -> Tensor:
        ctx.mean = mean
        work = torch.promote_types(x.dtype, torch.float32)
        t = (x.to(work) * F.silu(z.to(work))).unflatten(-1, (groups, -1))  # (..., g, s)
        scale = torch.rsqrt(mean(t.square().mean(-1, keepdim=True)) + eps)  # (..., g, 1)
        ctx.save_for_backward(x, z, weight, scale)
        return t.mul_(scale).flatten(-2).mul_(weight).to(x.dtype)  # (..., d)

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, dy: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, z, weight, scale = ctx.saved_tensors
        wide_x, wide_z, dy = (one.to(scale.dtype) for one in (x, z, dy))  # (..., d)
        gate = torch.sigmoid(wide_z)  # (..., d)
        open_ = wide_z * gate  # (..., d): silu(z)
        normal = (wide_x * open_).unflatten(-1, (scale.shape[-2], -1)).mul_(scale)  # (..., g, s)
        dweight = (dy * normal.flatten(-2)).flatten(0, -2).sum(0)  # (d,)
        dnormal = (dy * weight).unflatten(-1, (scale.shape[-2], -1))  # (..., g, s)
        along = ctx.mean((dnormal * normal).mean(-1, keepdim=True))  # (..., g, 1)
        dt = dnormal.sub_(normal.mul_(along)).mul_(scale).flatten(-2)  # (..., d)
        # silu'(z) = s + z s (1 - s)
        dz = dt * wide_x * (gate + open_ * (1 - gate))  # (..., d)
        dx, dz = dt.mul_(open_).to(x.dtype), dz.to(z.dtype)  # (..., d) both
        return dx, dz, dweight.to(weight.dtype), None, None, None


def _fast(x: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """mamba-ssm's Triton kernel."""
    from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn

    y: Tensor = rmsnorm_fn(
        x,
        weight,
        None,
        z=z,
        eps=eps,
        group_size=x.shape[-1] // groups,
        norm_before_gate=False,
    )  # (..., d)
    return y


CHOICE = Choice(
    "gated_rms_norm",
    [
        Implementation(
            name="mamba-ssm",
            run=_fast,
            module="mamba_ssm.ops.triton.layernorm_gated",
            unfit=on_gpu,
        ),
        Implementation(name="torch", run=_Norm.apply),
    ],
)
