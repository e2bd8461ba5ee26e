"""Routing of tokens to experts: each token goes through the few experts that its gate prefers.

Jiang et al. 2024 ("Mixtral of Experts"), section 2.1:

    y = sum over the k chosen e of p[e] / sum(p chosen) * W2[e] (silu(W1[e] x) * (W3[e] x)),
    p = softmax(W_gate x)

Shapes: t tokens, m d_model, f width of an expert, e experts, k experts of a token, c tokens of
one expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.ops.dispatch import Choice, Implementation


def route(x: Tensor, gate_weight: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts: weights (t, k), experts (t, k), logits (t, e).

    x (t, m), gate_weight (e, m), k = top_k.

    A token's weights sum to one. They are float32 (float64 for float64 inputs).
    """
    logits = F.linear(x, gate_weight)  # (t, e)
    work = torch.promote_types(x.dtype, torch.float32)
    p = torch.softmax(logits, dim=-1, dtype=work)  # (t, e)
    weights, chosen = p.topk(top_k, dim=-1)  # (t, k) both
    return weights / weights.sum(-1, keepdim=True), chosen, logits


def experts(
    x: Tensor, weights: Tensor, chosen: Tensor, w1: Tensor, w3: Tensor, w2: Tensor
) -> Tensor:
    """Compute y (t, m) of the equation above, for x (t, m) and the weights and experts of `route`.

    w1, w3 (e, f, m), w2 (e, m, f). Deterministic: a token's experts are added in order, never two
    at a time. The sum is float32 (float64 for float64 inputs); y has the dtype of x.
    """
    y: Tensor = CHOICE(x)(x, weights, chosen, w1, w3, w2)  # (t, m)
    return y


def load(logits: Tensor, chosen: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return how often each expert was chosen, and the sum of its p; float32 (2, e).

    logits (t, e), chosen (t, k); mask (t): False for tokens that do not count. Loads of several
    layers or several batches may be added.
    """
    p = torch.softmax(logits, dim=-1, dtype=torch.float32)  # (t, e)
    times = F.one_hot(chosen, logits.shape[-1]).sum(1).to(p.dtype)  # (t, e)
    both = torch.stack((times, p))  # (2, t, e)
    return (both if mask is None else both * mask[:, None]).sum(1)  # (2, e)


def balance_loss(loads: Tensor, top_k: int) -> Tensor:
    """Compute e * sum over experts of (share of tokens) * (mean p), () from loads (2, e).

    Fedus et al. 2021 ("Switch Transformers"), equations 4 to 6, with k choices per token: the
    result is k if all experts are used equally. Only the mean p has a gradient.
    """
    times, p = loads  # (e,) both
    tokens = (times.sum() / top_k).clamp(min=1)  # ()
    return len(times) * (times / tokens * (p / tokens)).sum()  # ()


class _Experts(torch.autograd.Function):
    """Saves the inputs and, for every chosen expert, the two products before the gate, (t k, f)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weights: Tensor, chosen: Tensor, w1: Tensor, w3: Tensor, w2: Tensor
    ) -> Tensor:
        y = torch.zeros_like(x, dtype=weights.dtype)  # (t, m)
        kept = []
        for e, rows, places in _groups(chosen, len(w1)):
            seen = x[rows]  # (c, m)
            gate, up = seen @ w1[e].t(), seen @ w3[e].t()  # (c, f) both
            out = (F.silu(gate) * up) @ w2[e].t()  # (c, m)
            # The rows of one expert are distinct, so no row is added to twice at a time.
            y.index_add_(0, rows, out * weights.flatten()[places, None])
            kept += [gate, up]
        ctx.save_for_backward(x, weights, chosen, w1, w3, w2, *kept)
        return y.to(x.dtype)  # (t, m)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weights, chosen, w1, w3, w2, *kept = ctx.saved_tensors
        work = weights.dtype
        dx = torch.zeros_like(x, dtype=work)  # (t, m)
        dweights = torch.zeros_like(weights).flatten()  # (t k,)
        dw1, dw3, dw2 = torch.zeros_like(w1), torch.zeros_like(w3), torch.zeros_like(w2)
        products = zip(kept[0::2], kept[1::2], strict=True)
        for (e, rows, places), (gate, up) in zip(_groups(chosen, len(w1)), products, strict=True):
            seen, dout, weight = x[rows], dy[rows], weights.flatten()[places, None]  # (c, m|m|1)
            s = torch.sigmoid(gate.to(work))  # (c, f)
            opened = gate * s  # (c, f), silu
            inner = opened * up  # (c, f)
            dinner = (dout @ w2[e]).to(work)  # (c, f), of the unweighted output
            dweights[places] = (dinner * inner).sum(-1)  # (c,)
            dw2[e] = dout.t() @ (inner * weight).to(x.dtype)  # (m, f)
            dinner *= weight  # (c, f)
            dup = (dinner * opened).to(x.dtype)  # (c, f)
            # silu'(z) = s + z s (1 - s)
            dgate = (dinner * up * (s + opened * (1 - s))).to(x.dtype)  # (c, f)
            dw1[e], dw3[e] = dgate.t() @ seen, dup.t() @ seen  # (f, m) both
            dx.index_add_(0, rows, (dgate @ w1[e] + dup @ w3[e]).to(work))
        return dx.to(x.dtype), dweights.view_as(weights), None, dw1, dw3, dw2


def _groups(chosen: Tensor, count: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each expert that has tokens: its number, its tokens (c), their places in (t k) (c)."""
    order = chosen.flatten().argsort(stable=True)  # (t k,)
    sizes = torch.bincount(chosen.flatten(), minlength=count).tolist()
    for e, places in enumerate(order.split(sizes)):  # (c,) each
        if len(places):
            yield e, places // chosen.shape[1], places


CHOICE = Choice("route", [Implementation(name="torch", run=_Experts.apply)])
"""A Choice of one, which keeps torch.compile out: sizes in here depend on the data."""
