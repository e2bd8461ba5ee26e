"""Layers that the ranks of a tensor group share: a small interface, implemented in torch.

`shared_cross_entropy` is the loss when each rank has the logits of its own words. The ranks
exchange three numbers per position: the largest logit, the sum of the exponentials, the
target's logit (Shoeybi et al. 2019, "Megatron-LM", section 3). As in training.ops.loss, the logits
exist for one chunk of positions at a time.

Shapes: N ranks of the group, v vocabulary size, m d_model, b batch, l length, r rows (b * l), c
rows of a chunk, w words of a rank (v / N).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from training.ops.loss import IGNORED, LOGITS, counted
from training.parallel.share import Share
from training.parallel.tensor import RowLinear


class Layers:
    """Makes layers of which each rank holds its own part, from torch's own operations."""

    def __init__(self, share: Share) -> None:
        self.share = share

    def column(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        """Make a layer from (..., inputs), equal on all ranks, to each rank's (..., outputs / N).

        Its weight is (outputs / N, inputs), its bias (outputs / N).
        """
        return ColumnLinear(inputs, outputs, bias, self.share)

    def row(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        """Make a layer from each rank's (..., inputs / N) to (..., outputs), equal on all ranks.

        Its weight is (outputs, inputs / N), its bias (outputs) on every rank.
        """
        layer = RowLinear(inputs // self.share.size, outputs, bias)
        layer.share = self.share
        return layer

    def embedding(self, rows: int, channels: int) -> nn.Module:
        """Make an embedding of ids (...) in (..., c), equal on all ranks; weight (rows / N, c)."""
        return SharedEmbedding(rows, channels, self.share)

    def loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        total: Tensor | None,
    ) -> Tensor:
        """Compute next_token_cross_entropy (), equal on all ranks, from each rank's own words.

        weight (v / N, m) is this rank's part of the output embedding.
        """
        return shared_cross_entropy(self.share, hidden, weight, targets, weights, total)  # ()

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Compute all logits, (b, l, m), (v / N, m) -> (b, l, v), without gradients."""
        own = (hidden @ weight.t()).contiguous()  # (b, l, v / N)
        parts = [torch.empty_like(own) for _ in range(self.share.size)]  # (b, l, v / N) each
        dist.all_gather(parts, own, group=self.share.group)
        return torch.cat(parts, -1)  # (b, l, v)


class ColumnLinear(nn.Linear):
    """A linear layer that begins a shared part: each rank has the rows of its own channels."""

    def __init__(self, inputs: int, outputs: int, bias: bool, share: Share) -> None:
        super().__init__(inputs, outputs // share.size, bias)
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out / N)."""
        (x,) = self.share.enter(x)  # (..., in)
        return F.linear(x, self.weight, self.bias)  # (..., out / N)


class SharedEmbedding(nn.Embedding):
    """An embedding whose words are divided evenly among the ranks."""

    def __init__(self, rows: int, channels: int, share: Share) -> None:
        super().__init__(rows // share.size, channels)
        self.share = share

    def forward(self, ids: Tensor) -> Tensor:
        """(...) -> (..., channels)."""
        local = ids - self.share.rank * self.num_embeddings  # (...)
        own = (local >= 0) & (local < self.num_embeddings)  # (...)
        found = F.embedding(torch.where(own, local, 0), self.weight)  # (..., channels)
        return self.share.leave(found * own[..., None])  # (..., channels)


def shared_cross_entropy(
    share: Share,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """Compute what next_token_cross_entropy does, equal on all ranks of the group.

    weight (w, m) is the output embedding of the rank's own words; all else is the same.
    """
    if total is None:
        total = counted(targets, weights).clamp(min=1e-30)  # (): avoids 0 / 0 if no row counts
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
