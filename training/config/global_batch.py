"""Divide the sequences of a step among the ranks: how many batches of which size each one takes.

A job that has lost a node keeps its steps: fewer ranks take more batches each. If the sequences do
not divide evenly, rows of a step's last batch have no targets. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from training.config import degrees
from training.config.config import Config
from training.errors import RequestError

RANKS = "RANKS_AT_START"
"""Environment variable of a job that may lose nodes: how many ranks it began with."""


def ranks_at_start(now: int, environ: Mapping[str, str]) -> int:
    """Return the number of ranks that a job began with: that of now unless RANKS states another.

    Raises RequestError if RANKS has an impossible value: ranks only become fewer.
    """
    text = environ.get(RANKS, "")
    ranks = int(text) if text.isdecimal() else 0
    if text and ranks < max(1, now):
        raise RequestError(
            f"{RANKS}: must be the number of ranks that the job began with, at least the {now} of "
            f"now, not {text!r}; fix: leave it out, as launchers set it"
        )
    return ranks or now


def accumulate(config: Config, readers: int) -> Config:
    """Set how many batches make up `global_batch` on `readers` data-parallel ranks.

    Raises RequestError if no whole number does, or if another one was asked for.
    """
    data = config.data
    at_once = data.batch_size * readers
    if not data.global_batch:
        return config
    if not readers:  # fewer ranks than one group needs, which the backend's check reports
        return config
    batches, rest = divmod(data.global_batch, at_once)
    if rest:
        below, above = batches * at_once, (batches + 1) * at_once
        nearest = f"{below:,} or {above:,}" if below else f"{above:,}"
        raise RequestError(
            f"global_batch: {data.global_batch:,} sequences are not a multiple of the {at_once:,} "
            f"of batch_size {data.batch_size} on {readers} data-parallel ranks (all ranks / "
            f"tensor_parallel {config.parallel.tensor_parallel} / context_parallel "
            f"{config.parallel.context_parallel}); fix: give the nearest, {nearest}"
        )
    if data.gradient_accumulation not in (1, batches):
        raise RequestError(
            f"gradient_accumulation: is {data.gradient_accumulation}, but global_batch "
            f"{data.global_batch:,} needs {batches} here; fix: leave one of the two out"
        )
    return replace(config, data=replace(data, gradient_accumulation=batches))


def share_out(config: Config, before: int, now: int) -> Config:
    """Let `now` data-parallel ranks take the same steps that `before` ranks took.

    config: as `accumulate` returns it. An evaluation takes as many sequences as before, or some
    more.
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
    """Return the size of a batch, at most `most`, and how many batches each reader takes.

    They have as few rows as possible in total, and then the largest batches.
    """
    each = -(-sequences // readers)
    batch = min(range(min(most, each), 0, -1), key=lambda size: -(-each // size) * size)
    return batch, -(-each // batch)


def why_not_on(config: Config, ranks: int) -> str:
    """Say why a run cannot continue on `ranks` ranks, fewer than it had; empty if it can."""
    parallel = config.parallel
    tensor, context = parallel.tensor_parallel, parallel.context_parallel
    found = degrees.world_faults(tensor, ranks, True, context)
    if parallel.sharding_strategy == "hsdp" and parallel.shard_group_size:
        found += degrees.copy_faults(ranks, parallel.shard_group_size)
    if parallel.cpu_offload and parallel.fsdp_engine != "fsdp2":
        found.append(
            "cpu_offload: several batches per step need fsdp_engine=fsdp2, as FSDP1 does not add "
            "up gradients that are in the host's memory"
        )
    return "; ".join(found)
