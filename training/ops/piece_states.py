"""The state before a rank's piece of rows, and the gradient of the state after it.

What the piece's own steps contribute is summed directly, without the states in between
(training.ops.pieces describes how the ranks combine their sums). With a[t] the exponent of step t,
S the state after the piece if it was zero before, and g the gradient of the state before the piece
if none flows in from behind:

    S = sum over t of exp(a[t+1] + ... + a[last]) u[t]     u: what step t puts into the state
    g = sum over t of exp(a[first] + ... + a[t]) w[t]      w: what step t's output gives back

Steps separated by the start of a document are left out. Both sums are computed chunk by chunk.

Shapes: b batch, l steps of the piece, c of a chunk; of Mamba-2 h heads, g groups, r = h / g, p
channels of a head, of Mamba-1 d channels; n state size.
"""

# ruff: noqa: N803  (A is the papers' own name)
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.ops.pieces import Piece
from training.ops.softplus import softplus

Chunk = tuple[Tensor, Tensor, Tensor]
"""Step sizes or their exponents, and the two factors of u or w."""


def ssd_before(inputs: Any, cuts: Sequence[slice], piece: Piece) -> Tensor:
    """Return Mamba-2's state before the piece, (b, g, n, r p); `inputs` are those of ssd."""

    def chunk(cut: slice) -> Chunk:
        exponents, delta = _exponents(inputs, cut)  # (b, g, r, c)
        x = inputs.rows(inputs.x, cut) * by_row(delta)  # (b, g, c, r, p)
        return exponents, inputs.B[:, cut].to(inputs.work), x  # B (b, c, g, n)

    state, span = _ssd_sums(inputs, cuts, piece, chunk, back=False)
    return piece.ranks.before(state, span, _ssd_faded)  # (b, g, n, r p)


def ssd_after(inputs: Any, cuts: Sequence[slice], piece: Piece, dy: Tensor) -> Tensor:
    """Return the gradient of the state after the piece, (b, g, n, r p), from dy (b, l, h, p)."""

    def chunk(cut: slice) -> Chunk:
        exponents, _ = _exponents(inputs, cut)  # (b, g, r, c)
        return exponents, inputs.C[:, cut].to(inputs.work), inputs.rows(dy, cut)

    gradient, span = _ssd_sums(inputs, cuts, piece, chunk, back=True)
    return piece.ranks.before(gradient, span, _ssd_faded, back=True)  # (b, g, n, r p)


def scan_before(inputs: Any, cuts: Sequence[slice], piece: Piece) -> Tensor:
    """Return Mamba-1's state before the piece, (b, n, d); `inputs` are those of selective_scan."""

    def chunk(cut: slice) -> Chunk:
        delta, x = _delta(inputs, cut), inputs.x[:, cut].to(inputs.work)  # (b, c, d) both
        return delta, inputs.B[:, cut].to(inputs.work), delta * x

    state, span = _scan_sums(inputs, cuts, piece, chunk, back=False)
    return piece.ranks.before(state, span, _scan_faded(inputs.A))  # (b, n, d)


def scan_after(inputs: Any, cuts: Sequence[slice], piece: Piece, dy: Tensor) -> Tensor:
    """Return the gradient of Mamba-1's state after the piece, (b, n, d), from dy (b, l, d)."""

    def chunk(cut: slice) -> Chunk:
        back = dy[:, cut].to(inputs.work)  # (b, c, d)
        if inputs.z is not None:
            back = back * F.silu(inputs.z[:, cut].to(inputs.work))  # (b, c, d)
        return _delta(inputs, cut), inputs.C[:, cut].to(inputs.work), back

    gradient, span = _scan_sums(inputs, cuts, piece, chunk, back=True)
    return piece.ranks.before(gradient, span, _scan_faded(inputs.A), back=True)  # (b, n, d)


def _exponents(inputs: Any, cut: slice) -> tuple[Tensor, Tensor]:
    """Return a chunk's exponents delta A in float64, and its delta; (b, g, r, c) both."""
    raw = inputs.raw(cut)  # (b, g, r, c)
    delta = softplus(raw).clamp(*inputs.limit)  # (b, g, r, c)
    return delta.double() * inputs.A.double(), delta


def _ssd_sums(
    inputs: Any,
    cuts: Sequence[slice],
    piece: Piece,
    chunk: Callable[[slice], Chunk],
    *,
    back: bool,
) -> tuple[Tensor, Tensor]:
    """Return S or g (b, g, n, r p) of the piece alone, and the exponent of its decay (b, g, r)."""
    total: Tensor | None = None
    span: Tensor | None = None
    for cut in reversed(cuts) if back else cuts:
        exponents, factor, x = chunk(cut)  # (b, g, r, c), (b, c, g, n), (b, g, c, r, p)
        sums = exponents.cumsum(-1)  # (b, g, r, c)
        fade = sums if back else sums[..., -1:] - sums  # (b, g, r, c)
        weights = fade.exp().to(inputs.work)  # (b, g, r, c)
        seen = piece.continues(cut) if back else piece.lasts(cut)  # (b, c)
        if seen is not None:
            weights = weights * seen[:, None, None]  # (b, g, r, c)
        whole = _cut_off(sums[..., -1].to(inputs.work), -math.inf, piece, cut)  # (b, g, r)
        weighted = (x * by_row(weights)).flatten(3)  # (b, g, c, r p)
        own = factor.permute(0, 2, 3, 1) @ weighted  # (b, g, n, r p)
        total = own if total is None else own + _ssd_faded(total, whole)  # (b, g, n, r p)
        span = whole if span is None else span + whole  # (b, g, r)
    assert total is not None and span is not None, "a piece has at least one step"
    return total, span


def _ssd_faded(state: Tensor, exponent: Tensor) -> Tensor:
    """Decay a state by an exponent, (b, g, n, r p), (b, g, r) -> (b, g, n, r p)."""
    by_head = state.unflatten(3, (exponent.shape[2], -1))  # (b, g, n, r, p)
    return (by_head * exponent.exp()[:, :, None, :, None]).flatten(3)  # (b, g, n, r p)


def by_row(head: Tensor) -> Tensor:
    """(b, g, r, c) -> (b, g, c, r, 1), to broadcast over the rows of x."""
    return head.transpose(2, 3)[..., None]  # (b, g, c, r, 1)


def _delta(inputs: Any, cut: slice) -> Tensor:
    """Return the step sizes of a chunk, (b, c, d)."""
    dt = inputs.dt[:, cut].to(inputs.work)  # (b, c, d)
    return softplus(dt if inputs.dt_bias is None else dt + inputs.dt_bias)  # (b, c, d)


def _scan_sums(
    inputs: Any,
    cuts: Sequence[slice],
    piece: Piece,
    chunk: Callable[[slice], Chunk],
    *,
    back: bool,
) -> tuple[Tensor, Tensor]:
    """Return S or g (b, n, d) of the piece alone, and the sum of its step sizes (b, d)."""
    faded = _scan_faded(inputs.A)
    total: Tensor | None = None
    span: Tensor | None = None
    for cut in reversed(cuts) if back else cuts:
        delta, factor, x = chunk(cut)  # (b, c, d), (b, c, n), (b, c, d)
        sums = delta.cumsum(1, dtype=torch.double)  # (b, c, d)
        fade = (sums if back else sums[:, -1:] - sums).to(inputs.work)  # (b, c, d)
        weights = torch.exp_(fade[:, :, None] * inputs.A)  # (b, c, n, d)
        weights *= factor[..., None]  # (b, c, n, d)
        seen = piece.continues(cut) if back else piece.lasts(cut)  # (b, c)
        if seen is not None:
            x = x * seen[..., None]  # (b, c, d)
        own = weights.mul_(x[:, :, None]).sum(1)  # (b, n, d)
        whole = _cut_off(sums[:, -1].to(inputs.work), math.inf, piece, cut)  # (b, d)
        total = own if total is None else own + faded(total, whole)  # (b, n, d)
        span = whole if span is None else span + whole  # (b, d)
    assert total is not None and span is not None, "a piece has at least one step"
    return total, span


def _scan_faded(A: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that decays a state (b, n, d) over a span (b, d), for A (n, d)."""
    return lambda state, span: state * torch.exp(span[:, None] * A)  # (b, n, d)


def _cut_off(span: Tensor, endless: float, piece: Piece, cut: slice) -> Tensor:
    """Let nothing pass a chunk in which a document begins: (b, ...) -> (b, ...)."""
    seen = piece.continues(cut)  # (b, c)
    if seen is None:
        return span
    ends = ~seen[:, -1]  # (b,)
    return span.masked_fill(ends.view(-1, *(1,) * (span.dim() - 1)), endless)  # (b, ...)
