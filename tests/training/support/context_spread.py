"""Models on rows that ranks share, compared with one model on whole rows: logits and gradients.

    torchrun --nproc_per_node=N -m tests.training.support.context_spread

For each family, with rows of several documents and of one, under each engine, recomputed, and with
tensor parallelism; four ranks run only what two cannot show. Writes a line for each case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.training.support.documents import (
    FAMILIES,
    Outcome,
    cut,
    difference,
    gradients,
    numbers,
    tokens,
)
from tests.training.support.documents_spread import fsdp, settings
from tests.training.support.families import filled
from tests.training.support.runs import ENGINES
from training.entrypoint import leave
from training.models import GraniteHybridConfig, LlamaConfig, MixtralConfig, RopeScaling, Sizes
from training.parallel.backend import find_backend
from training.process_group import Group, start, stop

LENGTH = 43  # no multiple of 2 or 4
WITHIN = 1e-5
DYNAMIC = LlamaConfig(
    **{"d_model": 32, "n_layer": 1, "vocab_size": 61, "n_head": 4, "n_kv_head": 2, "d_ff": 48},  # type: ignore[arg-type]
    rope_scaling=RopeScaling(kind="dynamic", factor=2.0, original_context=16),
)
"""Its angles depend on the length of the whole sequence."""
Lengths = list[list[int]]


def cases(ranks: int) -> Iterator[tuple[str, Sizes, dict[str, Any]]]:
    few = ranks <= 2
    engines, degrees = (ENGINES, range(1, ranks + 1)) if few else (ENGINES[-1:], (2,))
    for name, sizes in {**FAMILIES, "dynamic": DYNAMIC}.items():
        if isinstance(sizes, MixtralConfig) or (
            isinstance(sizes, GraniteHybridConfig) and sizes.n_expert
        ):
            sizes = replace(sizes, balance_coefficient=0.1)
        for engine in engines:
            for degree in degrees:
                parallel = {"fsdp_engine": engine, "context_parallel": degree}
                yield f"{name} {engine} {degree}", sizes, parallel
            parallel = {"fsdp_engine": engine, "context_parallel": ranks}
            recomputed = {**parallel, "fsdp_activation_checkpointing": True}
            yield f"{name} {engine} recomputed", sizes, recomputed
        if "fsdp2" in ENGINES and few:
            kept = {**recomputed, "checkpointing_policy": "selective"}
            yield f"{name} selective", sizes, kept
        if "fsdp2" in ENGINES and not few and name not in ("mamba", "gpt_neox"):
            yield f"{name} tensor", sizes, {"tensor_parallel": 2, "context_parallel": 2}


def main() -> None:
    world = start("cpu")
    for name, sizes, parallel in cases(world.world_size):
        config = settings(sizes, parallel)
        degrees = config.parallel.tensor_parallel, config.parallel.context_parallel
        group = replace(world, tensor_parallel=degrees[0], context_parallel=degrees[1])
        shared = find_backend("fsdp").build(config, group, None)
        for kind in ("documents", "whole"):
            apart = compare(shared, sizes, group, kind == "documents")
            assert apart <= WITHIN, f"{name} {kind}: {apart}"
            if group.rank == 0:
                print(f"{name} {kind}: {apart:.1e}", flush=True)
            group.barrier()
    stop()


def compare(shared: Any, sizes: Sizes, group: Group, documents: bool) -> float:
    """Return how far this rank's logits and the mean gradients are from one model's."""
    rows = rows_of(group.data_world_size, documents)
    wanted = expected(sizes, group.data_world_size, documents)
    mean = {name: torch.stack([each[1][name] for each in wanted]).mean(0) for name in wanted[0][1]}
    mine = group.data_rank
    found = outcome(shared, rows[mine], mine, documents, 1 / group.context_parallel)
    pair = fsdp(shared, mean)
    logits = wanted[mine][0]  # (b, l, v)
    model: Any = getattr(shared, "module", shared)
    if model.context_group is not None:
        logits = model.context_group.piece(logits, None).own(logits)
    return difference((found[0], pair[0]), (logits, pair[1]))


def rows_of(ranks: int, documents: bool) -> list[Lengths]:
    """Return the lengths of the documents in the rows of each rank that has rows of its own."""
    random = torch.Generator().manual_seed(7)
    most = 12 if documents else LENGTH
    return [[cut(random, LENGTH, most) for _ in range(2)] for _ in range(ranks)]


@cache  # most cases of a family have the same rows
def expected(sizes: Sizes, ranks: int, documents: bool) -> list[Outcome]:
    """Return one model's logits and gradients for the rows of each rank."""
    one = filled(sizes, 5)
    rows = rows_of(ranks, documents)
    return [outcome(one, row, seed, documents, 1.0) for seed, row in enumerate(rows)]


def outcome(model: Any, lengths: Lengths, seed: int, documents: bool, total: float) -> Outcome:
    """Return the logits, and the gradients of the sum of all losses over `total`."""
    inputs, targets = tokens(lengths, seed)
    seq_idx = numbers(lengths) if documents else None  # (b, l)
    model.zero_grad()
    with torch.no_grad():
        logits: Tensor = model(inputs, seq_idx=seq_idx)  # (b, l, v)
    model(inputs, targets, total=torch.tensor(total), seq_idx=seq_idx).backward()
    return logits, gradients(model)


if __name__ == "__main__":
    main()
    leave(0)
