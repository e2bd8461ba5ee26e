"""Next-token cross-entropy where each rank has the logits of its own words of the vocabulary.

The ranks of a tensor group exchange three numbers a position: the largest logit, the sum of the
exponentials, the target's logit (Shoeybi et al. 2019, "Megatron-LM", section 3). As in
training.ops.loss, the logits exist for one chunk of positions at a time.

Shapes: b batch, l length, r rows (b * l), c rows of a chunk, m d_model, v vocabulary size,
w words of a rank (v / N).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.ops.loss import IGNORED, LOGITS, counted
from training.parallel.share import Share


def shared_cross_entropy(
    share: Share,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """Compute what next_token_cross_entropy does, the same on every rank of the group.

    weight (w, m) is the output embedding of the rank's own words; all else is as there.
    """
    if total is None:
        total = counted(targets, weights).clamp(min=1e-30)  # (): 0 where no row counts
    flat = None if weights is None else weights.flatten()  # (r,)
    (hidden,) = share.enter(hidden)  # (b, l, m)
    loss: Tensor = _SharedCrossEntropy.apply(
        share, hidden.flatten(0, 1), weight, targets.flatten(), flat, total
    )
    return loss  # ()


class _SharedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        share: Share,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        total: Tensor,
    ) -> Tensor:
        work = torch.promote_types(hidden.dtype, torch.float32)
        shares = (targets != IGNORED).to(work) / total.to(work)  # (r,)
        shares = shares if weights is None else shares * weights  # (r,)
        first = share.rank * weight.shape[0]
        own = (targets >= first) & (targets < first + weight.shape[0])  # (r,)
        local = torch.where(own, targets - first, 0)  # (r,)
        dhidden = torch.empty_like(hidden)  # (r, m)
        dweight = torch.zeros_like(weight, dtype=work)  # (w, m)
        loss = hidden.new_zeros((), dtype=work)  # ()
        step = max(1, LOGITS // weight.shape[0])
        for at in range(0, hidden.shape[0], step):
            part = slice(at, at + step)
            h, portion = hidden[part], shares[part, None]  # (c, m), (c, 1)
            chosen, is_own = local[part, None], own[part, None].to(work)  # (c, 1) both
            logits = (h @ weight.t()).to(work)  # (c, w)
            most = share.sum(logits.amax(1, keepdim=True), dist.ReduceOp.MAX)  # (c, 1)
            logits -= most  # (c, w)
            picked = share.sum(logits.gather(1, chosen) * is_own)  # (c, 1)
            exponentials = logits.exp_()  # (c, w)
            norm = share.sum(exponentials.sum(1, keepdim=True))  # (c, 1)
            loss += ((norm.log() - picked) * portion).sum()  # ()
            dlogits = exponentials.div_(norm).scatter_add_(1, chosen, -is_own)  # (c, w)
            dlogits = dlogits.mul_(portion).to(hidden.dtype)  # (c, w)
            dhidden[part] = dlogits @ weight  # (c, m)
            dweight += (dlogits.t() @ h).to(work)  # (w, m)
        ctx.save_for_backward(dhidden, dweight.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dhidden, dweight = ctx.saved_tensors  # (r, m), (w, m)
        return (
            None,
            dhidden * dloss.to(dhidden.dtype),
            dweight * dloss.to(dweight.dtype),
            None,
            None,
            None,
        )
