"""Batches as Composer takes them, and what makes each target of a step count alike.

A batch is a dict: inputs and targets (b, l), weights (b, l) where targets weigh unevenly, and in a
micro-batch total (), by which its loss is divided. Of a step's micro-batches Composer adds up
loss x (share of the rank's samples), and takes the mean over the ranks. `total` is such that what
comes out is the sum over all targets that count in the whole step, over their number: the loss
depends on neither the micro-batch's size nor the number of ranks.
"""

from __future__ import annotations

import torch
from composer.utils import dist
from torch import Tensor

from training.data.base import Sample, stacked
from training.ops.loss import counted

Batch = dict[str, Tensor]


def collate(samples: list[Sample]) -> Batch:
    """Make a batch of samples that all have weights or all have none."""
    rows = stacked(samples)
    batch = {"inputs": rows.inputs, "targets": rows.targets}  # (b, l) each
    return batch if rows.weights is None else {**batch, "weights": rows.weights}  # (b, l)


def samples_in(batch: Batch) -> int:
    return len(batch["inputs"])


def tokens_in(batch: Batch) -> int:
    """Count a rank's tokens as the system does: one more a sample than it has targets."""
    samples, length = batch["inputs"].shape
    return samples * (length + 1)


def cut(batch: Batch, size: int) -> list[Batch]:
    """Cut a batch into parts of so many samples; the last may have fewer."""
    return [
        {name: one[at : at + size] for name, one in batch.items()}  # (size, l)
        for at in range(0, samples_in(batch), size)
    ]


def micro_batches(batch: Batch, size: int) -> list[Batch]:
    """Cut a rank's part of a step, whose size is a multiple (a collective call)."""
    parts = cut(batch, size)
    total = counted(batch["targets"], batch.get("weights"))  # ()
    if torch.cuda.is_available():
        total = total.cuda()  # (): NCCL adds up nothing else
    dist.all_reduce(total)
    share = (total / (len(parts) * dist.get_world_size())).clamp(min=1e-30)  # (): 0: none counts
    return [{**part, "total": share} for part in parts]
