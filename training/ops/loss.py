"""Next-token cross-entropy straight from the hidden states, a chunk of rows at a time.

The logits of a 50k vocabulary are the largest tensor of a small model's step. Here they exist for
one chunk only: its gradients are computed at once, while its logits are there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS = 1 << 25
"""Logits that exist at one time (128 MiB in float32)."""


def next_token_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean over all rows of -log softmax(hidden @ weight.T)[target], a float32 scalar.

    hidden (b, l, m); weight (v, m), the output embedding; targets (b, l), the token that follows
    each position. Softmax and sums are float32 (float64 for float64 inputs).
    """
    return _LinearCrossEntropy.apply(hidden.flatten(0, 1), weight, targets.flatten())  # ()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        work = torch.promote_types(hidden.dtype, torch.float32)
        rows, wants = hidden.shape[0], ctx.needs_input_grad
        dhidden = torch.empty_like(hidden) if wants[0] else None  # (r, m)
        dweight = torch.zeros_like(weight, dtype=work) if wants[1] else None  # (v, m)
        total = hidden.new_zeros((), dtype=work)  # ()
        step = max(1, LOGITS // weight.shape[0])
        for at in range(0, rows, step):
            h, t = hidden[at : at + step], targets[at : at + step]  # (c, m), (c,)
            log_p = F.log_softmax((h @ weight.t()).to(work), dim=-1)  # (c, v)
            total += F.nll_loss(log_p, t, reduction="sum")  # ()
            if dhidden is None and dweight is None:
                continue
            dlogits = log_p.exp_()  # (c, v)
            dlogits[torch.arange(len(t), device=t.device), t] -= 1.0
            dlogits = (dlogits / rows).to(hidden.dtype)  # (c, v)
            if dhidden is not None:
                dhidden[at : at + step] = dlogits @ weight  # (c, m)
            if dweight is not None:
                dweight += dlogits.t() @ h  # (v, m)
        ctx.save_for_backward(dhidden, None if dweight is None else dweight.to(weight.dtype))
        return total / rows  # ()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        dhidden, dweight = ctx.saved_tensors  # (r, m), (v, m)
        return (
            None if dhidden is None else dhidden * dloss.to(dhidden.dtype),
            None if dweight is None else dweight * dloss.to(dweight.dtype),
            None,
        )
