"""Next-token cross-entropy straight from the hidden states, a chunk of rows at a time.

The logits of a 50k vocabulary are the largest tensor of a small model's step. Here they exist for
one chunk only: its gradients are computed at once, while its logits are there.

Shapes: b batch, l length, r rows (b * l), c rows of a chunk, m d_model, v vocabulary size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS = 1 << 25
"""Logits that exist at one time (128 MiB in float32)."""

IGNORED = -100
"""The target of a position that does not count, as torch's own cross-entropy has it."""


def next_token_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean over the rows that count of -log softmax(hidden @ weight.T)[target], a float32 scalar.

    hidden (b, l, m); weight (v, m), the output embedding; targets (b, l), the token that follows
    each position, or -100 where none counts; 0 where no row does. Softmax and sums are float32
    (float64 for float64 inputs).
    """
    return _LinearCrossEntropy.apply(hidden.flatten(0, 1), weight, targets.flatten())  # ()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        work = torch.promote_types(hidden.dtype, torch.float32)
        wants = ctx.needs_input_grad
        counts = targets != IGNORED  # (r,)
        share = 1 / counts.sum().clamp(min=1).to(work)  # ()
        dhidden = torch.empty_like(hidden) if wants[0] else None  # (r, m)
        dweight = torch.zeros_like(weight, dtype=work) if wants[1] else None  # (v, m)
        total = hidden.new_zeros((), dtype=work)  # ()
        step = max(1, LOGITS // weight.shape[0])
        for at in range(0, hidden.shape[0], step):
            h, t = hidden[at : at + step], targets[at : at + step]  # (c, m), (c,)
            log_p = F.log_softmax((h @ weight.t()).to(work), dim=-1)  # (c, v)
            total += F.nll_loss(log_p, t, ignore_index=IGNORED, reduction="sum")  # ()
            if dhidden is None and dweight is None:
                continue
            counted = counts[at : at + step]  # (c,)
            dlogits = log_p.exp_()  # (c, v)
            rows = torch.arange(len(t), device=t.device)  # (c,)
            dlogits[rows, t.clamp(min=0)] -= 1.0
            dlogits = (dlogits * (counted * share)[:, None]).to(hidden.dtype)  # (c, v)
            if dhidden is not None:
                dhidden[at : at + step] = dlogits @ weight  # (c, m)
            if dweight is not None and h.dtype == work:
                dweight.addmm_(dlogits.t(), h)  # (v, m)
            elif dweight is not None:
                dweight += dlogits.t() @ h  # (v, m)
        ctx.save_for_backward(dhidden, None if dweight is None else dweight.to(weight.dtype))
        return total * share  # ()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        dhidden, dweight = ctx.saved_tensors  # (r, m), (v, m)
        return (
            None if dhidden is None else dhidden * dloss.to(dhidden.dtype),
            None if dweight is None else dweight * dloss.to(dweight.dtype),
            None,
        )
