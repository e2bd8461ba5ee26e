"""The sequences of a step: how many batches of how many each rank takes of them.

A job that has lost a node keeps its steps: fewer ranks take more batches each. Where the sequences
do not divide, rows of a step's last batch have no targets. Light: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from training.config import degrees
from training.config.config import Config
from training.errors import RequestError

RANKS = "RANKS_AT_START"
"""Variable of the ranks of a job that may lose nodes: how many ranks it has begun with."""


def ranks_at_start(now: int, environ: Mapping[str, str]) -> int:
    """Give the ranks that a job has begun with, which are those of now where nothing says others.

    Raises RequestError for a variable that says what cannot be: ranks only become fewer.
    """
    text = environ.get(RANKS, "")
    ranks = int(text) if text.isdecimal() else 0
    if text and ranks < max(1, now):
        raise RequestError(
            f"{RANKS}: must be the ranks that the job has begun with, at least the {now} of now, "
            f"not {text!r}; launchers set it, so leave it out"
        )
    return ranks or now


def accumulate(config: Config, readers: int) -> Config:
    """Set how many batches make up `global_batch` on so many data-parallel ranks.

    Raises RequestError if no whole number does, or if another one was asked for.
    """
    data = config.data
    at_once = data.batch_size * readers
    if not data.global_batch:
        return config
    if not readers:  # fewer ranks than one group takes, which the backend's check reports
        return config
    batches, rest = divmod(data.global_batch, at_once)
    if rest:
        below, above = batches * at_once, (batches + 1) * at_once
        nearest = f"{below:,} or {above:,}" if below else f"{above:,}"
        raise RequestError(
            f"global_batch: {data.global_batch:,} sequences are no multiple of the {at_once:,} of "
            f"batch_size {data.batch_size} on {readers} data-parallel ranks (all ranks / "
            f"tensor_parallel {config.parallel.tensor_parallel} / context_parallel "
            f"{config.parallel.context_parallel}); the nearest is {nearest}"
        )
    if data.gradient_accumulation not in (1, batches):
        raise RequestError(
            f"gradient_accumulation: {data.gradient_accumulation} batches were asked for, and "
            f"global_batch {data.global_batch:,} takes {batches} here; leave one of the two out"
        )
    return replace(config, data=replace(data, gradient_accumulation=batches))


def share_out(config: Config, before: int, now: int) -> Config:
    """Let `now` data-parallel ranks take the steps that `before` of them took, and as they are.

    config: as `accumulate` gives it. An evaluation takes as many sequences as it did, or some more.
    """
    data = config.data
    if now == before:
        return config
    sequences = data.batch_size * before * data.gradient_accumulation
    batch, batches = smaller_batches(sequences, now, data.batch_size)
    changed = replace(data, global_batch=sequences, batch_size=batch, gradient_accumulation=batches)
    if data.eval_dataset_path:
        changed = replace(
            changed,
            eval_batch_size=data.eval_batch_size or data.batch_size,
            eval_batches=-(-data.eval_batches * before // now),
        )
    return replace(config, data=changed)


def smaller_batches(sequences: int, readers: int, most: int) -> tuple[int, int]:
    """Give the size of a batch, at most `most`, and how many each reader takes.

    The least rows that do, in the largest batches.
    """
    each = -(-sequences // readers)
    batch = min(range(min(most, each), 0, -1), key=lambda size: -(-each // size) * size)
    return batch, -(-each // batch)


def why_not_on(config: Config, ranks: int) -> str:
    """Say why a run cannot go on with so many ranks, fewer than it had; empty where it can."""
    parallel = config.parallel
    tensor, context = parallel.tensor_parallel, parallel.context_parallel
    found = degrees.world_faults(tensor, ranks, True, context)
    if parallel.sharding_strategy == "hsdp" and parallel.shard_group_size:
        found += degrees.copy_faults(ranks, parallel.shard_group_size)
    if parallel.cpu_offload and parallel.fsdp_engine != "fsdp2":
        found.append(
            "cpu_offload: more batches a step take fsdp_engine=fsdp2, as FSDP1 does not add up "
            "gradients that are in the host's memory"
        )
    return "; ".join(found)
