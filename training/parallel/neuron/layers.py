"""The layers that the ranks of a tensor group share: a small interface, and torch's own way.

Shapes: N ranks of the group, v vocabulary size, m d_model, b batch, l length.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from training.parallel.layers import RowLinear
from training.parallel.neuron.loss import shared_cross_entropy
from training.parallel.share import Share


class Layers:
    """Makes layers of which each rank holds its own part, made of torch's own operations."""

    def __init__(self, share: Share) -> None:
        self.share = share

    def column(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        """Map (..., inputs), the same on all ranks, to the rank's own (..., outputs / N).

        Its weight is (outputs / N, inputs), its bias (outputs / N).
        """
        return ColumnLinear(inputs, outputs, bias, self.share)

    def row(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        """Map each rank's own (..., inputs / N) to (..., outputs), the same on all.

        Its weight is (outputs, inputs / N), its bias (outputs) on every rank.
        """
        layer = RowLinear(inputs // self.share.size, outputs, bias)
        layer.share = self.share
        return layer

    def embedding(self, rows: int, channels: int) -> nn.Module:
        """Map ids (...) to (..., c), the same on all ranks; the weight is (rows / N, c)."""
        return SharedEmbedding(rows, channels, self.share)

    def loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        total: Tensor | None,
    ) -> Tensor:
        """Compute next_token_cross_entropy (), the same on all ranks, of the rank's own words.

        weight (v / N, m) is this rank's part of the output embedding.
        """
        return shared_cross_entropy(self.share, hidden, weight, targets, weights, total)  # ()

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """(b, l, m), (v / N, m) -> all logits (b, l, v), without gradients."""
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
    """An embedding of which each rank has its own words, the same number on each."""

    def __init__(self, rows: int, channels: int, share: Share) -> None:
        super().__init__(rows // share.size, channels)
        self.share = share

    def forward(self, ids: Tensor) -> Tensor:
        """(...) -> (..., channels)."""
        local = ids - self.share.rank * self.num_embeddings  # (...)
        own = (local >= 0) & (local < self.num_embeddings)  # (...)
        found = F.embedding(torch.where(own, local, 0), self.weight)  # (..., channels)
        return self.share.leave(found * own[..., None])  # (..., channels)
