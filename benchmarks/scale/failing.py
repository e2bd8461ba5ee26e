"""How often a job should save when nodes fail: Young's and Daly's formulas, and a simulation.

All times in seconds. M is the job's mean time between failures, that of a node over the nodes;
failures come at exponential times, also while the job starts again. `stall` is how long training
stands still for a save, `writing` how long after that the checkpoint is complete, `restart` from a
failure to the first step. Waiting saves have their whole time in `stall` and none in `writing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, sqrt

import numpy as np


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


def daly(stall: float, mtbf: float) -> float:
    """Give the interval of Daly 2006, of higher order, for d < 2 M; from there on M."""
    if stall >= 2 * mtbf:
        return mtbf
    part = stall / (2 * mtbf)
    return sqrt(2 * stall * mtbf) * (1 + sqrt(part) / 3 + part / 9) - stall


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
    mtbf = job.mtbf
    first = work + job.stall + job.writing
    cycle = job.stall + max(work, job.writing)
    kept = work * exp(-first / mtbf) / -expm1(-cycle / mtbf)  # a start, in seconds of work
    return kept / (mtbf * exp(job.restart / mtbf))


def simulate(job: Job, work: float, starts: int, random: np.random.Generator) -> float:
    """Let a job start so often, each time train until it fails, and start again; the goodput."""
    failing = random.exponential(job.mtbf, starts)  # since each start; (starts,) as what follows
    spent = float(failing.sum()) + _restarts(starts, job, random)
    kept = 0.0  # work in checkpoints that were complete before the failure
    now, complete = 0.0, 0.0  # the time, and when the checkpoint before is complete
    while len(failing):
        now = max(now + work, complete) + job.stall
        complete = now + job.writing
        kept += work * int((failing >= complete).sum())
        failing = failing[failing >= now]
    return kept / spent


def _restarts(starts: int, job: Job, random: np.random.Generator) -> float:
    """Start so often again, from the failure on, until that does not fail itself; seconds."""
    seconds, left = 0.0, starts
    while left:
        failing = random.exponential(job.mtbf, left)
        seconds += float(np.minimum(failing, job.restart).sum())
        left = int((failing < job.restart).sum())
    return seconds
