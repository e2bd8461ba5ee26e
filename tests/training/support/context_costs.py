"""What ranks that share rows send each other in a step, and keep for its backward pass.

    torchrun --nproc_per_node=N -m tests.training.support.context_costs

Writes a line of JSON for each model: its name, and the bytes that each rank sent and kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tests.training.support.families import filled
from training.entrypoint import leave
from training.models import PRESETS, MixtralConfig, Sizes
from training.ops.pieces import ContextGroup
from training.process_group import start, stop

NAMES = ("mamba-tiny", "mamba2-tiny", "llama-tiny", "bamba-tiny", "mixtral-tiny")
BATCH, LENGTH = 2, 1026


def main() -> None:
    world = start("cpu")
    ranks = ContextGroup(world.rank, world.world_size, dist.group.WORLD)
    for name in NAMES:
        found = world.gather(costs(sizes_of(name), ranks))
        if world.rank == 0:
            print(json.dumps({"name": name, "sent": [a for a, _ in found], "kept": found[0][1]}))
    world.barrier()
    stop()


def sizes_of(name: str) -> Sizes:
    """Return the sizes of a preset; experts, if any, are balanced, to be used evenly."""
    sizes = PRESETS[name]
    return replace(sizes, balance_coefficient=0.1) if isinstance(sizes, MixtralConfig) else sizes


def costs(sizes: Sizes, ranks: ContextGroup) -> tuple[int, int]:
    """Return the bytes that this rank sends in a step, and keeps for the backward pass."""
    model = filled(sizes)
    model.context_group = ranks
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(sizes.vocab_size, (BATCH, LENGTH + 1), generator=random)  # (b, L + 1)
    with sending() as sent:
        with keeping({one.data_ptr() for one in model.parameters()}) as kept:
            loss = model(ids[:, :-1], ids[:, 1:], total=torch.tensor(1.0))  # ()
        loss.backward()
    return sum(sent), sum(kept.values())


@contextmanager
def sending() -> Iterator[list[int]]:
    """Record the bytes of every message; a message to all other ranks counts once for each.

    A sum over the ranks counts once, however it is computed.
    """
    sent: list[int] = []
    others = dist.get_world_size() - 1
    passing, gather, scatter, reduce = (
        dist.batch_isend_irecv,
        dist.all_gather_into_tensor,
        dist.reduce_scatter_tensor,
        dist.all_reduce,
    )

    def passed(calls: list[Any]) -> Any:
        sent.extend(one.tensor.nbytes for one in calls if one.op is dist.isend)
        return passing(calls)

    def gathered(output: Tensor, given: Tensor, **named: Any) -> Any:
        sent.append(others * given.nbytes)
        return gather(output, given, **named)

    def scattered(output: Tensor, given: Tensor, **named: Any) -> Any:
        sent.append(others * output.nbytes)
        return scatter(output, given, **named)

    def reduced(given: Tensor, **named: Any) -> Any:
        sent.append(given.nbytes)
        return reduce(given, **named)

    with (
        patch.object(dist, "all_reduce", reduced),
        patch.object(dist, "batch_isend_irecv", passed),
        patch.object(dist, "all_gather_into_tensor", gathered),
        patch.object(dist, "reduce_scatter_tensor", scattered),
    ):
        yield sent


@contextmanager
def keeping(parameters: set[int]) -> Iterator[dict[int, int]]:
    """Record the memory of all tensors kept for a backward pass, except for parameters."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield kept


if __name__ == "__main__":
    main()
    leave(0)
