"""What a job's failures have cost, kept in its log in the run's folder (training.job.job_log).

    {"kind": "failure", "time", "job", "restart", "restarted", "rank", "host", "node",
     "is_cause", "code", "meaning", "why", "step", "since", "step_seconds", "then", "because"}
    {"kind": "training", "time", "job", "restart", "restarted", "step", "seconds", "lost",
     "repeated", "read", "in_memory", "goodput"}

The node that sees a failure first notes it: restarted counts the restarts in place so far, step is
the last step taken and since the time of its end, both null before the first; then is an
escalation.Step and because its reason. rank is null for the loss of a node, which node 0 notes.
is_cause is false if the ranks failed because of others and nobody has noted why those did, or by an
error that all ranks raise.

Node 0 notes that the ranks train once the first step of a start is over: step is the one that they
went on from, seconds is the time since the last step before (for the first start, since the job
began), lost is the number of steps that are taken again and repeated the seconds that these had
taken. read is the seconds that reading the checkpoint took and in_memory the share of it that came
from the nodes' memory, both null without a checkpoint. goodput is the share of the job's time so
far that was in neither seconds nor repeated.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from training.cli import duration
from training.job import job_log
from training.job.node import Job
from training.job.restart.escalation import Failure, Step, Verdict
from training.job.restart.steps import Steps

METRICS = "metrics.jsonl"
ENDS = (Step.REQUEUE.value, Step.GIVE_UP.value, Step.FIX.value)
"""The steps after a failure with which a start of the job ends."""
TAIL = 1 << 16  # bytes to read of the end of METRICS
ALONE = "local"  # the job id without Slurm, under which many runs share a log

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Outage:
    """Since when the job does not train, and how far it had come; None if that is not known."""

    since: float  # seconds since the epoch
    step: int | None = None
    step_seconds: float | None = None


class Ledger:
    """A job's log, as one of its nodes reads and continues it."""

    def __init__(self, job: Job, folders: Sequence[Path]) -> None:
        """Read the existing log. folders: job_log's; the first is read, all are written."""
        self._job, self._folders = job, list(folders)
        self._records = self._read()
        begun = [one["time"] for one in self._records if one.get("kind") == "start"]
        self.begun = float(begun[0]) if begun else time.time()
        self._not_trained = sum(
            one.get("seconds", 0.0) + one.get("repeated", 0.0)
            for one in self._records
            if one.get("kind") == "training"
        )

    def failures(self) -> list[Failure]:
        """Return the failures of the starts before this one.

        A failure noted after the one that ended a start is that same one, seen by another node.
        """
        found: list[Failure] = []
        ended: set[Any] = set()  # starts
        for one in self._records:
            if one.get("kind") != "failure" or one.get("restart") in ended:
                continue
            if one.get("then") in ENDS:
                ended.add(one.get("restart"))
            found.append(
                Failure(
                    rank=one.get("rank", 0),
                    code=one.get("code", 1),
                    step=one.get("step"),
                    host=one.get("host", ""),
                    is_cause=one.get("is_cause", True),
                )
            )
        return found

    def outage(self) -> Outage:
        """Find since when the job does not train, from the notes of the last start that did.

        The run's metrics alone are not enough: another job may have written them.
        """
        starts = [n for n, one in enumerate(self._records) if one.get("kind") == "start"]
        for begin, end in reversed(list(pairwise(starts))):
            for one in reversed(self._records[begin:end]):
                if one.get("kind") == "failure" and one.get("since"):
                    return Outage(
                        since=one["since"],
                        step=one.get("step"),
                        step_seconds=one.get("step_seconds"),
                    )
                if one.get("kind") == "training":
                    return self._by_metrics() or Outage(since=self._records[end - 1]["time"])
        return Outage(since=self.begun)

    def failed(
        self, failure: Failure, verdict: Verdict, restarted: int, step_seconds: float | None
    ) -> None:
        """Note a failure and what follows it. Never fails."""
        record = failure.record() | {
            "restarted": restarted,
            "meaning": job_log.meaning(failure.code),
            "step_seconds": step_seconds,
            "then": verdict.step.value,
            "because": verdict.why,
        }
        job_log.note(self._job, self._folders, "failure", record)

    def trains(self, steps: Steps, outage: Outage, restarted: int) -> str:
        """Note that the first step of a start is over; return in words what that cost."""
        seconds = max(0.0, steps.first_at - outage.since)
        lost = None if outage.step is None else max(0, outage.step - steps.resumed)
        repeated = (lost or 0) * (outage.step_seconds or 0.0)
        self._not_trained += seconds + repeated
        record = {
            "restarted": restarted,
            "step": steps.resumed,
            "seconds": round(seconds, 3),
            "lost": lost,
            "repeated": round(repeated, 3),
            "read": None if steps.in_memory is None else round(steps.read, 3),
            "in_memory": None if steps.in_memory is None else round(steps.in_memory, 4),
            "goodput": self.goodput(steps.first_at),
        }
        job_log.note(self._job, self._folders, "training", record)
        if lost is None:
            return ""
        share = f"{self.goodput(steps.first_at):.1%} of the job's time was training"
        return (
            f"goes on after step {steps.resumed}, {duration(seconds)} after the last step; "
            f"{_read_from(steps)}"
            f"{lost} steps ({duration(repeated)}) are taken again; {share}"
        )

    def goodput(self, now: float) -> float:
        """Return the share of the job's time until now that was spent on training that is kept."""
        whole = now - self.begun
        return max(0.0, round(1.0 - self._not_trained / whole, 4)) if whole > 0 else 0.0

    def _read(self) -> list[Record]:
        """Read the job's log; without Slurm, only its last start."""
        found: list[Record] = []
        for folder in self._folders[:1]:
            with suppress(OSError):
                lines = job_log.path(folder, self._job).read_bytes().splitlines()
                found = [one for line in lines if (one := _parse(line)) and _is_timed(one)]
        starts = [n for n, one in enumerate(found) if one.get("kind") == "start"]
        return found[starts[-1] :] if self._job.id == ALONE and starts else found

    def _by_metrics(self) -> Outage | None:
        """Tell from its metrics how far a start came that was killed with its nodes."""
        for folder in reversed(self._folders):
            path = folder / METRICS
            with suppress(OSError), path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL))
                records = [one for line in file if (one := _parse(line)) is not None]
                taken = [one for one in records if one.get("kind") == "step"]
                speeds = [one for one in records if one.get("kind") == "report"]
                return Outage(
                    since=path.stat().st_mtime,
                    step=taken[-1].get("step") if taken else None,
                    step_seconds=speeds[-1].get("seconds_per_step") if speeds else None,
                )
        return None


def _read_from(steps: Steps) -> str:
    """Say where the checkpoint came from and how long that took; empty if none was read."""
    if steps.in_memory is None:
        return ""
    place = "disk"
    if steps.in_memory == 1.0:
        place = "memory"
    elif steps.in_memory:
        place = f"memory ({steps.in_memory:.0%}) and disk"
    return f"its state was read from {place} in {steps.read:.1f} s; "


def here() -> str:
    """Name this node as the log does."""
    return socket.gethostname()


def _is_timed(record: Record) -> bool:
    return isinstance(record.get("time"), (int, float))


def _parse(line: bytes) -> Record | None:
    with suppress(ValueError):
        record = json.loads(line)
        return record if isinstance(record, dict) else None
    return None
