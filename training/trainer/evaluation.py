"""Loss on held-out data, read in order from its start each time."""

from __future__ import annotations

from itertools import count

import torch
import torch.distributed as dist
from torch import nn

from training.data.base import DataFeed
from training.ops.loss import counted
from training.process_group import Group


@torch.no_grad()
def evaluate(model: nn.Module, data: DataFeed, batches: int, group: Group) -> tuple[float, int]:
    """Mean loss over the targets that count, and how many these are (a collective call).

    batches: of every rank, at most; 0 for all that there are. No sample is taken twice.
    """
    data.rewind()
    sums = torch.zeros(2, dtype=torch.float64, device=group.device)  # loss, weight
    one = torch.ones((), device=group.device)  # (): so that the model gives the sum
    was_training = model.training
    model.eval()
    for _ in range(batches) if batches else count():
        part = data.next_rows(range(data.batch_size))
        if not group.any(not part.spent):
            break
        batch = part.rows.to(group.device)
        loss = model(batch.inputs, batch.targets, weights=batch.weights, total=one)  # ()
        sums += torch.stack((loss, counted(batch.targets, batch.weights)))  # (2,)
    model.train(was_training)
    dist.all_reduce(sums)
    loss, weight = (sums / group.tensor_parallel).tolist()  # ranks that read the same count once
    return loss / max(weight, 1e-30), round(weight)
