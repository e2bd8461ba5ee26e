"""Selective scan: the linear recurrence at the heart of Mamba-1, memory linear in the length.

Gu & Dao 2023, section 3.3.2 and algorithm 2:

    h[t] = exp(delta[t] A) h[t-1] + delta[t] B[t] x[t]        y[t] = C[t] h[t] + D x[t]

Shapes: b batch, l length, d channels (the paper's E or d_inner), n state size (the paper's N).

How it is computed. The sequence is cut into chunks, and a chunk into S segments of K steps.
All segments of a chunk advance together (K vectorised steps), then their ends are joined
(S steps), so a chunk costs K + S steps instead of K * S. Every factor is exp(delta A) with
delta >= 0 and A < 0, hence in (0, 1]: nothing can overflow, whatever the length. Only the state
at each chunk's start is kept for the backward pass, which computes the chunk's states again.
"""

# ruff: noqa: N803, N806  (A, B, C, D are the paper's own names)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CUT = {"cpu": (32, 8), "cuda": (256, 16)}
"""(steps of a chunk, steps K of a segment) by device: a chunk's states fit a CPU's cache, and are
large enough for a GPU to be worth a kernel's start."""


def selective_scan(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """Compute y of the recurrence above for x, delta (b, l, d), A (d, n), B, C (b, l, n) and D (d).

    `delta` must be >= 0 (after softplus) and A < 0. The state starts at zero. Computed in float32
    (float64 for float64 inputs) whatever the input's dtype; the result has the dtype of x.
    """
    work = torch.promote_types(x.dtype, torch.float32)
    y = _Scan.apply(
        x.to(work),  # (b, l, d)
        delta.to(work),  # (b, l, d)
        A.to(work).t(),  # (n, d)
        B.to(work),  # (b, l, n)
        C.to(work),  # (b, l, n)
        *CUT[x.device.type],
    )  # (b, l, d)
    return (y + D.to(work) * x.to(work)).to(x.dtype)  # (b, l, d)


class _Scan(torch.autograd.Function):
    """The scan without the D term; A comes transposed so that the channels are contiguous."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk: int,
        segment: int,
    ) -> Tensor:
        length = x.shape[1]
        h = x.new_zeros(x.shape[0], *A.shape)  # (b, n, d)
        starts, ys = [], []
        for at in range(0, length, chunk):
            cut = slice(at, min(at + chunk, length))
            starts.append(h)
            _, states = _states(x[:, cut], delta[:, cut], A, B[:, cut], h, segment)  # (b, c, n, d)
            ys.append((C[:, cut, None, :] @ states).squeeze(2))  # (b, c, d)
            h = states[:, -1].clone()  # (b, n, d)
        ctx.save_for_backward(x, delta, A, B, C, torch.stack(starts))  # starts: (l/chunk, b, n, d)
        ctx.cut = chunk, segment
        return torch.cat(ys, dim=1)  # (b, l, d)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, delta, A, B, C, starts = ctx.saved_tensors
        chunk, segment = ctx.cut
        dx, ddelta = torch.empty_like(x), torch.empty_like(delta)  # (b, l, d)
        dB, dC = torch.empty_like(B), torch.empty_like(C)  # (b, l, n)
        dA = torch.zeros_like(A)  # (n, d)
        # What the steps after the chunk pass back to its last state.
        inflow = torch.zeros_like(starts[0])  # (b, n, d)
        for index in reversed(range(len(starts))):
            cut = slice(index * chunk, min((index + 1) * chunk, x.shape[1]))
            xc, dc, dyc = x[:, cut], delta[:, cut], dy[:, cut]  # (b, c, d)
            decay, h = _states(xc, dc, A, B[:, cut], starts[index], segment)  # (b, c, n, d)
            dC[:, cut] = (h @ dyc[..., None]).squeeze(3)  # (b, c, n)
            g = C[:, cut, :, None] * dyc[:, :, None, :]  # (b, c, n, d)
            inflow = _accumulate_back(decay, g, inflow, segment)  # (b, n, d); g is now dL/dh
            u = dc * xc  # (b, c, d)
            du = (B[:, cut, None, :] @ g).squeeze(2)  # (b, c, d)
            dB[:, cut] = (g @ u[..., None]).squeeze(3)  # (b, c, n)
            dx[:, cut] = du * dc  # (b, c, d)
            # dL/d(delta A) = dL/dh[t] * exp(delta A) * h[t-1], in g's place.
            g *= decay  # (b, c, n, d)
            g[:, 1:] *= h[:, :-1]  # (b, c-1, n, d)
            g[:, 0] *= starts[index]  # (b, n, d)
            dA += (g * dc[:, :, None, :]).sum(dim=(0, 1))  # (n, d)
            ddelta[:, cut] = du * xc + (g * A).sum(dim=2)  # (b, c, d)
        return dx, ddelta, dA, dB, dC, None, None


def _states(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, h: Tensor, segment: int
) -> tuple[Tensor, Tensor]:
    """Decays exp(delta A) and states h of one chunk, both (b, c, n, d), from the state before it.

    x, delta (b, c, d), A (n, d), B (b, c, n), h (b, n, d).
    """
    decay = torch.exp(delta[:, :, None, :] * A)  # (b, c, n, d)
    states = B[..., None] * (delta * x)[:, :, None, :]  # (b, c, n, d), so far only the inputs
    whole, steps = _segments(x.shape[1], segment)
    start = h
    if whole:
        d, s = _fold(decay, whole, segment), _fold(states, whole, segment)  # (b, S, K, n, d)
        end, product = s[:, :, 0].clone(), d[:, :, 0].clone()  # (b, S, n, d)
        for k in range(1, segment):
            torch.addcmul(s[:, :, k], d[:, :, k], end, out=end)  # (b, S, n, d)
            product *= d[:, :, k]  # (b, S, n, d)
        begins = torch.empty_like(end)  # (b, S, n, d)
        for i in range(whole):
            begins[:, i] = start  # (b, n, d)
            start = torch.addcmul(end[:, i], product[:, i], start)  # (b, n, d)
        s[:, :, 0].addcmul_(d[:, :, 0], begins)  # (b, S, n, d)
        for k in range(1, segment):
            s[:, :, k].addcmul_(d[:, :, k], s[:, :, k - 1])  # (b, S, n, d)
    for t in steps:
        states[:, t].addcmul_(decay[:, t], states[:, t - 1] if t else start)  # (b, n, d)
    return decay, states


def _accumulate_back(decay: Tensor, g: Tensor, inflow: Tensor, segment: int) -> Tensor:
    """Turn g[t], the gradient of y reaching state t directly, into dL/dh[t], in place.

    g[t] += decay[t+1] g[t+1]; decay, g (b, c, n, d). `inflow` (b, n, d) is decay * dL/dh of the
    step after the chunk; the result is the same for the step before it.
    """
    whole, steps = _segments(g.shape[1], segment)
    for t in reversed(steps):
        g[:, t] += inflow  # (b, n, d)
        inflow = decay[:, t] * g[:, t]  # (b, n, d)
    if whole:
        d, s = _fold(decay, whole, segment), _fold(g, whole, segment)  # (b, S, K, n, d)
        out = d[:, :, -1] * s[:, :, -1]  # (b, S, n, d)
        product = d[:, :, -1].clone()  # (b, S, n, d)
        for k in reversed(range(segment - 1)):
            out += s[:, :, k]  # (b, S, n, d)
            out *= d[:, :, k]  # (b, S, n, d)
            product *= d[:, :, k]  # (b, S, n, d)
        inflows = torch.empty_like(out)  # (b, S, n, d)
        for i in reversed(range(whole)):
            inflows[:, i] = inflow  # (b, n, d)
            inflow = torch.addcmul(out[:, i], product[:, i], inflow)  # (b, n, d)
        s[:, :, -1] += inflows  # (b, S, n, d)
        for k in reversed(range(segment - 1)):
            s[:, :, k].addcmul_(d[:, :, k + 1], s[:, :, k + 1])  # (b, S, n, d)
    return inflow


def _segments(length: int, segment: int) -> tuple[int, range]:
    """How many whole segments a chunk has, and the steps after them, which go one by one."""
    whole = length // segment
    return whole, range(whole * segment, length)


def _fold(chunk: Tensor, whole: int, segment: int) -> Tensor:
    """View the whole segments of (b, c, n, d) as (b, S, K, n, d)."""
    return chunk[:, : whole * segment].unflatten(1, (whole, segment))  # (b, S, K, n, d)
