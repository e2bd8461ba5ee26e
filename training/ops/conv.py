"""Causal depthwise convolution over time: each channel sees its own last k steps.

y[t] = bias + sum over j of weight[j] x[t - (k - 1) + j], with zeros before the start of the
document; then optionally SiLU. Gu & Dao 2023, section 3.4.

Shapes: b batch, l length, d channels, k taps.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.ops.dispatch import Choice, Implementation, log, on_gpu, on_neuron
from training.ops.documents import Documents
from training.ops.nki import torch_ops
from training.ops.pieces import Piece


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool = False,
    documents: Documents | None = None,
) -> Tensor:
    """Compute y (b, l, d) for x (b, l, d), weight (d, 1, k) as in nn.Conv1d, and bias (d).

    documents: of x; without them each row is one document. For a piece of rows, the inputs before
    it come from the previous rank. Raises RequestError if the pieces are too short for that.
    """
    if isinstance(documents, Piece) and weight.shape[-1] > 1:
        taps = weight.shape[-1] - 1
        led, around = documents.led(x, taps), documents.around(taps)  # (b, k - 1 + l, d)
        return causal_conv1d(led, weight, bias, silu, around)[:, taps:]  # (b, l, d)
    y: Tensor = CHOICE(x)(x, weight, bias, silu, documents)  # (b, l, d)
    return y


@torch.no_grad()
def causal_conv1d_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool = False
) -> Tensor:
    """Compute `causal_conv1d` after the last k - 1 inputs, state (b, k - 1, d), and update it."""
    seen = torch.cat((state, x), dim=1)  # (b, k - 1 + l, d)
    if state.shape[1]:
        state.copy_(seen[:, -state.shape[1] :])  # (b, k - 1, d)
    y = _convolved(seen, weight, bias)[:, -x.shape[1] :]  # (b, l, d)
    return F.silu(y) if silu else y  # (b, l, d)


class _Conv(torch.autograd.Function):
    """A sum of k shifted products: nn.Conv1d on (b, d, l) would not keep the channels contiguous.

    Only x is saved; SiLU's input is recomputed. A tap must not reach beyond the start of a
    document. The forward pass goes from the oldest tap to the newest: after each, y is set to 0
    where that tap reached too far, as all older ones did too. The backward pass goes from the
    newest to the oldest: before each, dy is set to 0 at these positions.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        silu: bool,
        documents: Documents | None,
    ) -> Tensor:
        ctx.silu, ctx.documents = silu, documents
        ctx.save_for_backward(x, weight, bias)
        y = _convolved(x, weight, bias, documents)  # (b, l, d)
        return F.silu(y, inplace=True) if silu else y  # (b, l, d)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias = ctx.saved_tensors
        if ctx.silu:
            y = _convolved(x, weight, bias, ctx.documents)  # (b, l, d)
            dy = torch.ops.aten.silu_backward(dy, y)  # (b, l, d)
        if ctx.documents is not None:  # dy is changed below; the given gradient must not be
            dy = dy.contiguous() if ctx.silu else dy.clone(memory_format=torch.contiguous_format)
        wide = torch.promote_types(x.dtype, torch.float32)
        dbias = None if bias is None else dy.sum((0, 1), dtype=wide).to(bias.dtype)  # (d,)
        newest, *older = _taps(weight)
        dx, met = dy * newest, dy * x  # (b, l, d) both
        sums = [met.sum((0, 1), dtype=wide)]  # of (d,)
        for back, tap in enumerate(older, 1):
            if ctx.documents is not None:
                dy.view(-1, dy.shape[2]).index_fill_(0, ctx.documents.before(back), 0)
            later = dy[:, back:]  # (b, l - back, d)
            _but_last(dx, back).addcmul_(later, tap)
            # Into the memory of the first product: allocating takes longer than multiplying.
            pairs = torch.mul(later, _but_last(x, back), out=met[:, back:])  # (b, l - back, d)
            sums.append(pairs.sum((0, 1), dtype=wide))
        dweight = torch.stack(sums[::-1], dim=1)[:, None].to(weight.dtype)  # (d, 1, k)
        return dx, dweight, dbias, None, None


def _taps(weight: Tensor) -> list[Tensor]:
    """Return each tap's weights (d,), newest first; contiguous, as strided ones double the time."""
    return list(reversed(weight[:, 0].t().contiguous().unbind()))


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, documents: Documents | None = None
) -> Tensor:
    """Compute y (b, l, d) from x (b, l, d), with zeros before it."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    y = torch.zeros(x.shape, dtype=dtype, device=x.device)  # (b, l, d)
    for back, tap in reversed(list(enumerate(_taps(weight)))):
        y[:, back:].addcmul_(_but_last(x, back), tap)  # (b, l - back, d)
        if back and documents is not None:
            y.view(-1, y.shape[2]).index_fill_(0, documents.before(back), 0)
    return y if bias is None else y.add_(bias)  # (b, l, d)


def _but_last(x: Tensor, steps: int) -> Tensor:
    """Return all but the last `steps` positions of x (b, l, d): (b, l - steps, d), or none."""
    return x[:, : max(0, x.shape[1] - steps)]


def _torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, documents: Documents | None
) -> Tensor:
    if documents is not None and documents.is_fixed:
        return torch_ops.masked_conv1d(x, weight, bias, silu, documents)  # (b, l, d)
    documents = documents if weight.shape[-1] > 1 else None  # a single tap sees no earlier steps
    y: Tensor = _Conv.apply(x, weight, bias, silu, documents)  # (b, l, d)
    return y


def _fast(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, documents: Documents | None
) -> Tensor:
    """Dao's CUDA kernel; it takes (b, d, l) with contiguous channels without a copy.

    It needs multiples of 8: the channels, and the strides between steps, which may be those of a
    slice of a projection.
    """
    from causal_conv1d import causal_conv1d_fn

    channels, taps = x.shape[2], weight.shape[2]
    if channels % 8 or not 2 <= taps <= 4:
        _note_unfit(channels, taps)
        return _torch(x, weight, bias, silu, documents)  # (b, l, d)
    if x.stride(0) % 8 or x.stride(1) % 8 or x.stride(2) != 1:
        x = x.contiguous()  # (b, l, d)
    y = causal_conv1d_fn(
        x.transpose(1, 2),
        weight[:, 0],
        bias,
        seq_idx=None if documents is None else documents.seq_idx,
        activation="silu" if silu else None,
    )  # (b, d, l)
    return y.transpose(1, 2)  # (b, l, d)


@functools.cache
def _note_unfit(channels: int, taps: int) -> None:
    log.info("causal_conv1d: torch for %d channels and %d taps", channels, taps)


CHOICE = Choice(
    "causal_conv1d",
    [
        Implementation(name="causal-conv1d", run=_fast, module="causal_conv1d", unfit=on_gpu),
        Implementation(
            name="nki", run=torch_ops.causal_conv1d, module=torch_ops.NKI, unfit=on_neuron
        ),
        Implementation(name="torch", run=_torch),
    ],
)
