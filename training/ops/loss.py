"""Next-token cross-entropy directly from the hidden states, one chunk of rows at a time.

The logits of a 50k vocabulary are the largest tensor of a small model's step. Here they exist for
only one chunk, whose gradients are computed at once.

Shapes: b batch, l length, r rows (b * l), c rows of a chunk, m d_model, v vocabulary size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS = 1 << 25
"""Logits that exist at a time (128 MiB in float32)."""

IGNORED = -100
"""The target of a position that does not count, as in torch's own cross-entropy."""


def next_token_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """Sum -w log softmax(hidden @ weight.T)[target] over the rows that count; divide by `total`.

    hidden (b, l, m); weight (v, m), the output embedding; targets (b, l), the token that follows
    each position, or -100 for none; weights (b, l), each row's w, by default 1; total (), by
    default `counted` of these rows, which gives the mean. The result is a float32 scalar; softmax
    and sums are float32 too (float64 for float64 inputs).
    """
    if total is None:
        total = counted(targets, weights).clamp(min=1e-30)  # (): avoids 0 / 0 if no row counts
    flat = None if weights is None else weights.flatten()  # (r,)
    return _LinearCrossEntropy.apply(hidden.flatten(0, 1), weight, targets.flatten(), flat, total)


def counted(targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the summed weights of the targets that count, a float32 scalar."""
    counts = (targets != IGNORED).float()  # (b, l)
    return (counts if weights is None else counts * weights).sum()  # ()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        total: Tensor,
    ) -> Tensor:
        work = torch.promote_types(hidden.dtype, torch.float32)
        wants = ctx.needs_input_grad
        shares = (targets != IGNORED).to(work) / total.to(work)  # (r,)
        shares = shares if weights is None else shares * weights  # (r,)
        dhidden = torch.empty_like(hidden) if wants[0] else None  # (r, m)
        dweight = torch.zeros_like(weight, dtype=work) if wants[1] else None  # (v, m)
        loss = hidden.new_zeros((), dtype=work)  # ()
        step = max(1, LOGITS // weight.shape[0])
        for at in range(0, hidden.shape[0], step):
            h, share = hidden[at : at + step], shares[at : at + step, None]  # (c, m), (c, 1)
            t = targets[at : at + step, None].clamp(min=0)  # (c, 1)
            log_p = F.log_softmax((h @ weight.t()).to(work), dim=-1)  # (c, v)
            loss -= (log_p.gather(1, t) * share).sum()  # ()
            if dhidden is None and dweight is None:
                continue
            dlogits = log_p.exp_().scatter_add_(1, t, -torch.ones_like(share))  # (c, v)
            dlogits = dlogits.mul_(share).to(hidden.dtype)  # (c, v)
            if dhidden is not None:
                dhidden[at : at + step] = dlogits @ weight  # (c, m)
            if dweight is not None and h.dtype == work:
                dweight.addmm_(dlogits.t(), h)  # (v, m)
            elif dweight is not None:
                dweight += dlogits.t() @ h  # (v, m)
        ctx.save_for_backward(dhidden, None if dweight is None else dweight.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dhidden, dweight = ctx.saved_tensors  # (r, m), (v, m)
        return (
            None if dhidden is None else dhidden * dloss.to(dhidden.dtype),
            None if dweight is None else dweight * dloss.to(dweight.dtype),
            None,
            None,
            None,
        )
