"""Causal depthwise convolution over time: each channel sees itself and its last steps.

y[t] = bias + sum over j of weight[j] x[t - (k - 1) + j], zeros before the start; then SiLU where
it is asked for. Shapes: b batch, l length, d channels, k taps. Gu & Dao 2023, section 3.4.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.ops.dispatch import Choice, Implementation, on_gpu, on_neuron
from training.ops.nki import torch_ops


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool = False) -> Tensor:
    """Compute y (b, l, d) for x (b, l, d), weight (d, 1, k) as nn.Conv1d holds it and bias (d)."""
    y: Tensor = CHOICE(x)(x, weight, bias, silu)  # (b, l, d)
    return y


@torch.no_grad()
def causal_conv1d_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool = False
) -> Tensor:
    """Compute the same after the last k - 1 inputs, (b, k - 1, d), which are brought up to date."""
    seen = torch.cat((state, x), dim=1)  # (b, k - 1 + l, d)
    if state.shape[1]:
        state.copy_(seen[:, -state.shape[1] :])  # (b, k - 1, d)
    y = _convolved(seen, weight, bias)  # (b, l, d)
    return F.silu(y) if silu else y  # (b, l, d)


class _Conv(torch.autograd.Function):
    """A sum of k shifted products: nn.Conv1d on (b, d, l) would not keep the channels contiguous.

    Only x is kept; with SiLU, what goes into it is computed again.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
    ) -> Tensor:
        ctx.silu = silu
        ctx.save_for_backward(x, weight, bias)
        y = _convolved(_padded(x, weight), weight, bias)  # (b, l, d)
        return F.silu(y, inplace=True) if silu else y  # (b, l, d)

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, dy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, bias = ctx.saved_tensors
        taps, length = weight.shape[-1], x.shape[1]
        padded = _padded(x, weight)  # (b, k - 1 + l, d)
        if ctx.silu:
            y = _convolved(padded, weight, bias)  # (b, l, d)
            gate = torch.sigmoid(y)  # (b, l, d)
            # silu'(y) = s + y s (1 - s)
            dy = dy * gate * (1 + y * (1 - gate))  # (b, l, d)
        wide = torch.promote_types(x.dtype, torch.float32)
        dweight = torch.stack(
            [(dy * padded[:, j : j + length]).sum((0, 1), dtype=wide) for j in range(taps)], dim=1
        )  # (d, k)
        ahead = F.pad(dy, (0, 0, 0, taps - 1))  # (b, l + k - 1, d): nothing comes from beyond
        dx = ahead[:, :length] * weight[:, 0, taps - 1]  # (b, l, d)
        for j in range(1, taps):
            dx.addcmul_(ahead[:, j : j + length], weight[:, 0, taps - 1 - j])  # (b, l, d)
        dbias = None if bias is None else dy.sum((0, 1), dtype=wide).to(bias.dtype)  # (d,)
        return dx, dweight[:, None].to(weight.dtype), dbias, None


def _padded(x: Tensor, weight: Tensor) -> Tensor:
    return F.pad(x, (0, 0, weight.shape[-1] - 1, 0))  # (b, k - 1 + l, d)


def _convolved(padded: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(b, k - 1 + l, d) -> (b, l, d)."""
    taps = weight.shape[-1]
    length = padded.shape[1] - taps + 1
    y = padded[:, :length] * weight[:, 0, 0]  # (b, l, d)
    for j in range(1, taps):
        y.addcmul_(padded[:, j : j + length], weight[:, 0, j])  # (b, l, d)
    return y if bias is None else y.add_(bias)  # (b, l, d)


def _fast(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Dao's CUDA kernel; it takes (b, d, l) with contiguous channels as it is."""
    from causal_conv1d import causal_conv1d_fn

    activation = "silu" if silu else None
    y = causal_conv1d_fn(x.transpose(1, 2), weight[:, 0], bias, activation=activation)  # (b, d, l)
    return y.transpose(1, 2)  # (b, l, d)


CHOICE = Choice(
    "causal_conv1d",
    [
        Implementation(name="causal-conv1d", run=_fast, module="causal_conv1d", unfit=on_gpu),
        Implementation(
            name="nki", run=torch_ops.causal_conv1d, module=torch_ops.NKI, unfit=on_neuron
        ),
        Implementation(name="torch", run=_Conv.apply),
    ],
)
