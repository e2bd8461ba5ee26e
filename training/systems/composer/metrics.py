"""What an evaluation measures: loss, perplexity, and how often the target is among the likeliest.

Shapes: b batch, l length, r rows (b * l), c rows of a chunk, v vocabulary size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from training.ops.loss import IGNORED, LOGITS

TOPS = (3, 10)
"""How many of the likeliest tokens."""


def measure(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over targets (b, l) that count: their number, their loss, hits among each of TOPS.

    logits (b, l, v) -> (2 + len(TOPS),) in float64; softmax in float32.
    """
    sums = torch.zeros(2 + len(TOPS), dtype=torch.float64, device=logits.device)
    rows, wanted = logits.flatten(0, 1), targets.flatten()  # (r, v), (r,)
    step = max(1, LOGITS // rows.shape[1])
    for at in range(0, len(rows), step):
        t = wanted[at : at + step]  # (c,)
        counts = t != IGNORED  # (c,)
        t = t[counts]  # (c,) of those that count
        part = rows[at : at + step][counts].float()  # (c, v)
        loss = F.cross_entropy(part, t, reduction="sum")  # ()
        above = (part > part.gather(1, t[:, None])).sum(1)  # (c,): tokens that are likelier
        hits = [(above < top).sum() for top in TOPS]  # () each
        sums += torch.stack([counts.sum(), loss, *hits]).double()
    return sums


class _Mean(Metric):
    """The mean of a column of `measure` over all batches and ranks."""

    full_state_update = False
    count: Tensor
    sum: Tensor

    def __init__(self, column: int) -> None:
        super().__init__()
        self.column = column
        zero = torch.zeros((), dtype=torch.float64)  # ()
        self.add_state("count", zero, dist_reduce_fx="sum")
        self.add_state("sum", zero.clone(), dist_reduce_fx="sum")

    def update(self, sums: Tensor) -> None:
        """Add what was measured of a batch, as `measure` gives it."""
        self.count += sums[0]  # ()
        self.sum += sums[self.column]  # ()

    def compute(self) -> Tensor:
        return self.sum / self.count.clamp(min=1)  # ()


class _Perplexity(_Mean):
    def compute(self) -> Tensor:
        return super().compute().exp()  # ()


class _Count(_Mean):
    def compute(self) -> Tensor:
        return self.count  # ()


def metrics() -> dict[str, Metric]:
    """Make the metrics of an evaluation by their names."""
    tops = {f"top{top}": _Mean(column) for column, top in enumerate(TOPS, 2)}
    return {"loss": _Mean(1), "perplexity": _Perplexity(1), **tops, "tokens": _Count(0)}
