"""Layers whose work the ranks of a tensor group share; each computes what the whole one does."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from training.models.llama import MLP, Attention
from training.models.mixtral import Experts
from training.parallel.share import Shared


class RowLinear(Shared, nn.Linear):
    """A linear layer that ends a shared part: each rank has the columns of its own channels."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in / N) -> (..., out), the same on all ranks; the bias is added once."""
        y = self.share.leave(F.linear(x, self.weight))  # (..., out)
        return y if self.bias is None else y + self.bias  # (..., out)


class SharedAttention(Shared, Attention):
    """Each rank has its own heads: rows of q, k and v, columns of o."""

    def forward(self, hidden: Tensor, *context: Any) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model)."""
        (hidden,) = self.share.enter(hidden)  # (b, l, d_model)
        return super().forward(hidden, *context)  # (b, l, d_model)


class SharedMLP(Shared, MLP):
    """Each rank has its own channels: rows of gate and up, columns of down."""

    def forward(self, hidden: Tensor) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model)."""
        (hidden,) = self.share.enter(hidden)  # (b, l, d_model)
        return super().forward(hidden)  # (b, l, d_model)


class SharedExperts(Shared, Experts):
    """Each rank has some channels of every expert; all choose alike."""

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """(t, d_model), (t, k), (t, k) -> (t, d_model)."""
        # In two calls: x may be bfloat16, the weights are float32.
        (x,), (weights,) = self.share.enter(x), self.share.enter(weights)  # (t, m), (t, k)
        return self.share.leave(super().forward(x, weights, chosen))  # (t, d_model)
