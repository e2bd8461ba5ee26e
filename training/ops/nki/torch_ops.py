"""The kernels as torch operations, with their gradients.

They take and return the same as the other implementations in `training.ops.ssd` and
`training.ops.conv`. On a Neuron device a kernel becomes part of the XLA graph; on the CPU NKI's
simulator computes it, in float32. Elementwise operations around a kernel are left to torch.

The kernels do not support documents, and their graphs are compiled once, wherever documents begin.
So SSD is given, for the first step of each document, a delta after which nothing is left of the
state before, and an x that is smaller in proportion. As each of the kernels' exponents is a sum of
its own terms, no other one loses digits by it. The convolution is then torch's, with each tap times
0 or 1.
"""

# ruff: noqa: N803, N806  (A, B, C, D are the paper's own names)
from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.errors import RequestError
from training.ops.documents import FORGETS, Documents
from training.ops.nki.arguments import check_conv, check_ssd
from training.ops.nki.limits import TIME
from training.ops.softplus import softplus

NKI = "training.ops.nki.namespace"
"""Module that can be imported if NKI is installed."""


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor | None,
    chunk: int,
    limit: tuple[float, float] = (0.0, math.inf),
    documents: Documents | None = None,
) -> Tensor:
    """Compute y (b, l, h, p) as training.ops.ssd does; see there for the arguments.

    `chunk` is the model's; the kernels always use 128, which changes y only by rounding.
    Raises RequestError for arguments that the kernels cannot take.
    """
    check_ssd(x, B, C)
    raw = dt.float() if dt_bias is None else dt.float() + dt_bias.float()  # (b, l, h)
    delta = softplus(raw)  # (b, l, h)
    if limit != (0.0, math.inf):
        delta = delta.clamp(*limit)  # (b, l, h)
    wide, D = A.float(), D.float()  # (h,) each
    if documents is None:
        y: Tensor = _SSD.apply(x, delta, wide, B, C, D)  # (b, l, h, p)
        return y
    begins = documents.begins[..., None]  # (b, l, 1)
    long = FORGETS / wide.detach().abs()  # (h,)
    share = torch.where(begins, delta / long, 1)  # (b, l, h)
    small, step = x * share[..., None].to(x.dtype), torch.where(begins, long, delta)
    y = _SSD.apply(small, step, wide, B, C, torch.zeros_like(D))  # (b, l, h, p)
    return y + (x * D[:, None]).to(y.dtype)  # (b, l, h, p)


class _SSD(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
    ) -> Tensor:
        flat = (x.flatten(2), delta, A[None], B.flatten(2), C.flatten(2), D[None])
        y, states = launch("ssd_forward", "ssd_forward", *flat)  # (b, l, h p), (b, q, g, n, r p)
        ctx.save_for_backward(x, delta, A, B, C, D, states)
        return y.to(x.dtype).view_as(x)  # (b, l, h, p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        x, delta, A, B, C, D, states = ctx.saved_tensors
        flat = (x.flatten(2), delta, A[None], B.flatten(2), C.flatten(2), D[None])
        found = launch("ssd_backward", "ssd_backward", dy.flatten(2), *flat, states)
        dx, ddelta, dA, dB, dC, dD = found
        return (
            dx.to(x.dtype).view_as(x),  # (b, l, h, p)
            ddelta,  # (b, l, h)
            dA.sum(0),  # (h,)
            dB.to(B.dtype).view_as(B),  # (b, l, g, n)
            dC.to(C.dtype).view_as(C),  # (b, l, g, n)
            dD.sum(0),  # (h,)
        )


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    documents: Documents | None = None,
) -> Tensor:
    """Compute y (b, l, d) as training.ops.conv does; see there for the arguments.

    Raises RequestError for arguments that the kernels cannot take.
    """
    check_conv(x, weight)
    if documents is not None:
        return masked_conv1d(x, weight, bias, silu, documents)  # (b, l, d)
    shift = weight.new_zeros(weight.shape[0]) if bias is None else bias  # (d,)
    y: Tensor = _Conv.apply(x, weight, shift, silu)  # (b, l, d)
    return y


def masked_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, documents: Documents
) -> Tensor:
    """Compute `causal_conv1d` elementwise, with shapes that depend on those of x alone."""
    taps, wide = weight.shape[-1], x.to(torch.promote_types(x.dtype, torch.float32))  # (b, l, d)
    y = wide * weight[:, 0, taps - 1]  # (b, l, d)
    for step in range(1, min(taps, x.shape[1])):
        earlier = F.pad(wide, (0, 0, step, 0))[:, : x.shape[1]]  # (b, l, d)
        own = documents.same(step)[..., None].to(wide.dtype)  # (b, l, 1)
        y = y + earlier * own * weight[:, 0, taps - 1 - step]  # (b, l, d)
    y = y if bias is None else y + bias  # (b, l, d)
    return (F.silu(y) if silu else y).to(x.dtype)  # (b, l, d)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, silu: bool
    ) -> Tensor:
        ctx.silu = silu
        ctx.save_for_backward(x, weight, bias)
        steps, rest = _tiling(x.shape[1])
        before = weight.shape[2] - 1
        padded = F.pad(x.transpose(1, 2), (before, rest))  # (b, d, k - 1 + l + rest)
        parts = (padded, weight[:, 0], bias[:, None], steps, silu)
        (y,) = launch("conv", "conv_forward", *parts)  # (b, d, l + rest)
        return y[:, :, : x.shape[1]].transpose(1, 2).to(x.dtype)  # (b, l, d)

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, dy: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, bias = ctx.saved_tensors
        steps, rest = _tiling(x.shape[1])
        around = weight.shape[2] - 1
        ahead = F.pad(dy.transpose(1, 2), (0, rest + around))  # (b, d, l + rest + k - 1)
        padded = F.pad(x.transpose(1, 2), (around, rest + around))  # (b, d, k-1 + l + rest + k-1)
        parts = (ahead, padded, weight[:, 0], bias[:, None], steps, ctx.silu)
        dx, dweight, dbias = launch("conv", "conv_backward", *parts)
        return (
            dx[:, :, : x.shape[1]].transpose(1, 2).to(x.dtype),  # (b, l, d)
            dweight[:, None].to(weight.dtype),  # (d, 1, k)
            dbias[:, 0].to(bias.dtype),  # (d,)
            None,
        )


def _tiling(length: int) -> tuple[int, int]:
    """Cut a length into equal tiles: return the steps of a tile, and the padding of the last."""
    tiles = -(-length // TIME)
    steps = -(-length // tiles)
    return steps, tiles * steps - length


def launch(module: str, kernel: str, *arguments: Tensor | int) -> tuple[Tensor, ...]:
    """Run a kernel on the tensors' device. Raises RequestError without NKI."""
    try:
        run = getattr(import_module(f"training.ops.nki.{module}"), kernel)
        simulate = import_module(NKI).simulate
    except ImportError as error:
        raise RequestError(f"NKI kernels cannot run: {error}") from error
    first = arguments[0]
    if isinstance(first, Tensor) and first.device.type == "cpu":
        arrays = (
            one.detach().float().contiguous().numpy() if isinstance(one, Tensor) else one
            for one in arguments
        )
        found = simulate(run)(*arrays)
        outputs = found if isinstance(found, tuple) else (found,)
        return tuple(torch.from_numpy(one) for one in outputs)
    found = run(*arguments)
    return found if isinstance(found, tuple) else (found,)
