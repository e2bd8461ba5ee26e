"""Causal depthwise convolution over time: each channel sees itself and its last steps.

y[t] = bias + sum over j of weight[j] x[t - (k - 1) + j], zeros before the start of the document;
then SiLU where it is asked for. Gu & Dao 2023, section 3.4.

Shapes: b batch, l length, d channels, k taps, n documents that do not begin a row, r positions that
these begin with, k - 1 each or fewer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.ops.dispatch import Choice, Implementation, on_gpu, on_neuron
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
    """Compute y (b, l, d) for x (b, l, d), weight (d, 1, k) as nn.Conv1d holds it and bias (d).

    documents: of x; without them each row is one. Of a piece of rows, the taps that lie in the rank
    before are passed on from there. Raises RequestError where the pieces are too short for that.
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
    """Compute the same after the last k - 1 inputs, (b, k - 1, d), which are brought up to date."""
    seen = torch.cat((state, x), dim=1)  # (b, k - 1 + l, d)
    if state.shape[1]:
        state.copy_(seen[:, -state.shape[1] :])  # (b, k - 1, d)
    y = _convolved(seen, weight, bias)  # (b, l, d)
    return F.silu(y) if silu else y  # (b, l, d)


class _Conv(torch.autograd.Function):
    """A sum of k shifted products: nn.Conv1d on (b, d, l) would not keep the channels contiguous.

    Only x is kept; with SiLU, what goes into it is computed again. What was summed over two
    documents is computed anew, both ways: that is little, and all else stays as it is.
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
        heads = None if documents is None else _Heads(x, weight, documents)
        y = _summed(_padded(x, weight), weight, bias, heads)  # (b, l, d)
        return F.silu(y, inplace=True) if silu else y  # (b, l, d)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias = ctx.saved_tensors
        padded = _padded(x, weight)  # (b, k - 1 + l, d)
        heads = None if ctx.documents is None else _Heads(x, weight, ctx.documents)
        if ctx.silu:
            y = _summed(padded, weight, bias, heads)  # (b, l, d)
            gate = torch.sigmoid(y)  # (b, l, d)
            # silu'(y) = s + y s (1 - s)
            dy = dy * gate * (1 + y * (1 - gate))  # (b, l, d)
        wide = torch.promote_types(x.dtype, torch.float32)
        dbias = None if bias is None else dy.sum((0, 1), dtype=wide).to(bias.dtype)  # (d,)
        if heads is not None:
            dy = dy.contiguous() if ctx.silu else dy.clone(memory_format=torch.contiguous_format)
            dheads = heads.taken(dy)  # (n, k - 1, d)
        dx = _passed_back(dy, weight)  # (b, l, d)
        dweight = _of_weight(dy, padded, weight, wide)  # (d, k)
        if heads is not None:
            heads.add(dx, _passed_back(dheads, weight))
            dweight += heads.of_weight(dheads, wide)  # (d, k)
        return dx, dweight[:, None].to(weight.dtype), dbias, None, None


class _Heads:
    """The first k - 1 positions of each document, as rows of their own: they see nothing before.

    Of a shorter document the rest is of the next one: nothing sees it, and it is not put back.
    """

    def __init__(self, x: Tensor, weight: Tensor, documents: Documents) -> None:
        self.steps = weight.shape[-1] - 1
        found = documents.heads(self.steps)
        self.sources, self.picked, self.where = found  # (n (k - 1),), (r,), (r,)
        seen = x.flatten(0, 1).index_select(0, self.sources)  # (n (k - 1), d)
        self.padded = _padded(seen.unflatten(0, (-1, self.steps)), weight)  # (n, 2 (k - 1), d)

    def put(self, y: Tensor, heads: Tensor) -> None:
        """Put what was computed of them (n, k - 1, d) in their places of y (b, l, d)."""
        rows = heads.flatten(0, 1).index_select(0, self.picked)  # (r, d)
        y.view(-1, y.shape[2]).index_copy_(0, self.where, rows)

    def taken(self, dy: Tensor) -> Tensor:
        """Take their gradients out of dy (b, l, d), where zeros are left: (n, k - 1, d)."""
        flat = dy.view(-1, dy.shape[2])  # (b l, d)
        taken = dy.new_zeros(len(self.sources), dy.shape[2])  # (n (k - 1), d)
        taken.index_copy_(0, self.picked, flat.index_select(0, self.where))
        flat.index_fill_(0, self.where, 0)
        return taken.unflatten(0, (-1, self.steps))  # (n, k - 1, d)

    def of_weight(self, dheads: Tensor, wide: torch.dtype) -> Tensor:
        """The gradient of the weight (d, k): in two calls, as these are few positions."""
        taps = self.padded.unfold(1, self.steps + 1, 1)[:, : self.steps]  # (n, k - 1, d, k)
        return (dheads[..., None] * taps).sum((0, 1), dtype=wide)  # (d, k)

    def add(self, dx: Tensor, dseen: Tensor) -> None:
        """Add the gradients of what they see (n, k - 1, d) to dx (b, l, d)."""
        dx.view(-1, dx.shape[2]).index_add_(0, self.sources, dseen.flatten(0, 1))


def _summed(padded: Tensor, weight: Tensor, bias: Tensor | None, heads: _Heads | None) -> Tensor:
    """The convolution of what has zeros before it, (b, k - 1 + l, d) -> (b, l, d)."""
    y = _convolved(padded, weight, bias)  # (b, l, d)
    if heads is not None:
        heads.put(y, _convolved(heads.padded, weight, bias))
    return y


def _of_weight(dy: Tensor, padded: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
    """The gradient of the weight (d, k), of y's (b, l, d)."""
    length = dy.shape[1]
    taps = (padded[:, j : j + length] for j in range(weight.shape[-1]))  # (b, l, d) each
    return torch.stack([(dy * tap).sum((0, 1), dtype=wide) for tap in taps], dim=1)  # (d, k)


def _passed_back(dy: Tensor, weight: Tensor) -> Tensor:
    """The gradient of x (b, l, d), of y's (b, l, d)."""
    length = dy.shape[1]
    last, *others = reversed(weight[:, 0].unbind(1))  # (d,) each
    ahead = F.pad(dy, (0, 0, 0, len(others)))  # (b, l + k - 1, d): nothing comes from beyond
    dx = ahead[:, :length] * last  # (b, l, d)
    for j, tap in enumerate(others, 1):
        dx.addcmul_(ahead[:, j : j + length], tap)  # (b, l, d)
    return dx


def _torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, documents: Documents | None
) -> Tensor:
    if documents is not None and documents.is_fixed:
        return torch_ops.masked_conv1d(x, weight, bias, silu, documents)  # (b, l, d)
    documents = documents if weight.shape[-1] > 1 else None  # one tap sees nothing before
    y: Tensor = _Conv.apply(x, weight, bias, silu, documents)  # (b, l, d)
    return y


def _padded(x: Tensor, weight: Tensor) -> Tensor:
    return F.pad(x, (0, 0, weight.shape[-1] - 1, 0))  # (b, k - 1 + l, d)


def _convolved(padded: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(b, k - 1 + l, d) -> (b, l, d)."""
    first, *others = weight[:, 0].unbind(1)  # (d,) each
    length = padded.shape[1] - len(others)
    y = padded[:, :length] * first  # (b, l, d)
    for j, tap in enumerate(others, 1):
        y.addcmul_(padded[:, j : j + length], tap)  # (b, l, d)
    return y if bias is None else y.add_(bias)  # (b, l, d)


def _fast(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, documents: Documents | None
) -> Tensor:
    """Dao's CUDA kernel; it takes (b, d, l) with contiguous channels as it is."""
    from causal_conv1d import causal_conv1d_fn

    y = causal_conv1d_fn(
        x.transpose(1, 2),
        weight[:, 0],
        bias,
        seq_idx=None if documents is None else documents.seq_idx,
        activation="silu" if silu else None,
    )  # (b, d, l)
    return y.transpose(1, 2)  # (b, l, d)


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
