"""How often a job should save when nodes fail: Young's and Daly's formulas, and a simulation.

All times in seconds. M is the job's mean time between failures, that of a node over the nodes;
failures come at exponential times, also while the job starts again. `stall` is how long training
stands still for a save, `writing` how long after that the checkpoint is complete, `restart` from a
failure to the first step. Waiting saves have their whole time in `stall` and none in `writing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, expm1, sqrt

import numpy as np

from training.checkpoint.interval import daly


@dataclass(frozen=True)
class Job:
    """What a job loses time by, in seconds."""

    mtbf: float
    stall: float
    writing: float
    restart: float


def young(stall: float, mtbf: float) -> float:
    """Give the interval of Young 1974, of first order: sqrt(2 d M), for d << M."""
    return sqrt(2 * stall * mtbf)


def interval(job: Job) -> float:
    """Give the seconds of work between saves: Daly's, but no less than a save takes to write.

    A save waits for the one before it, so a shorter interval saves no oftener.
    """
    return max(daly(job.stall, job.mtbf), job.writing)


def goodput(job: Job, work: float) -> float:
    """Give the share of all time that is work which is kept, with `work` seconds between saves.

    Between two failures, exp(-r / M) of the failures leave time to work; the n-th checkpoint is
    complete first + (n - 1) x cycle after the start, and each adds `work`. Without `writing` this
    is the work over Daly's time of a run with failures.
    """
    return goodput_of_kinds(job, work, [(1.0, job.restart)])


def goodput_of_kinds(job: Job, work: float, kinds: Sequence[tuple[float, float]]) -> float:
    """Give the same where failures are of several kinds: the share of each, and its restart.

    Of the failures a share of sum(p exp(-r / M)) is followed by work: the others by one more
    failure, of any kind, before it has started again.
    """
    mtbf = job.mtbf
    first = work + job.stall + job.writing
    cycle = job.stall + max(work, job.writing)
    kept = work * exp(-first / mtbf) / -expm1(-cycle / mtbf)  # a start, in seconds of work
    return kept / mtbf * sum(share * exp(-restart / mtbf) for share, restart in kinds)


def simulate(
    job: Job,
    work: float,
    starts: int,
    random: np.random.Generator,
    kinds: Sequence[tuple[float, float]] = (),
) -> float:
    """Let a job start so often, each time train until it fails, and start again; the goodput.

    kinds: of failures, as goodput_of_kinds has them; none: all take the job's restart.
    """
    failing = random.exponential(job.mtbf, starts)  # since each start; (starts,) as what follows
    spent = float(failing.sum()) + _restarts(starts, job, random, kinds or [(1.0, job.restart)])
    kept = 0.0  # work in checkpoints that were complete before the failure
    now, complete = 0.0, 0.0  # the time, and when the checkpoint before is complete
    while len(failing):
        now = max(now + work, complete) + job.stall
        complete = now + job.writing
        kept += work * int((failing >= complete).sum())
        failing = failing[failing >= now]
    return kept / spent


def _restarts(
    starts: int, job: Job, random: np.random.Generator, kinds: Sequence[tuple[float, float]]
) -> float:
    """Start so often again, from the failure on, until that does not fail itself; seconds."""
    seconds, left = 0.0, starts
    shares, restarts = zip(*kinds, strict=True)
    while left:
        takes = (
            random.choice(restarts, left, p=shares) if len(kinds) > 1 else restarts[0]
        )  # (left,)
        failing = random.exponential(job.mtbf, left)  # (left,)
        seconds += float(np.minimum(failing, takes).sum())
        left = int((failing < takes).sum())
    return seconds
