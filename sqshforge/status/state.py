"""In which state a run is: judged from facts alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from sqshforge.status.checkpoints import Checkpoints
from sqshforge.status.hang import Hang
from sqshforge.status.jobs import AGAIN, FINAL, OUTSIDE, End, Job
from sqshforge.status.metrics import Progress
from sqshforge.status.records import Settings

LEAST = 300.0  # seconds in which a run that trains may be quiet
INTERVALS = 4  # times as long as a report interval
BEGIN = 1800.0  # seconds that containers, nodes and compilers take before the first report
SAME = 60.0  # seconds between two files that one moment of a run has written


class State(str, Enum):
    """What a run does."""

    RUNNING = "running"
    WAITING = "waiting"  # for its next start, after a failure
    SAVED = "saved"  # stopped by a signal, after a checkpoint
    DONE = "done"
    FAILED = "failed"  # and is not started again
    SILENT = "silent"  # nothing for long, and no end was noted


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the state is judged by.

    `times` has for each kind of file when it was written last, in seconds of the epoch by the file
    system's clock; `now` is of the same clock.
    """

    settings: Settings
    progress: Progress
    checkpoints: Checkpoints
    hang: Hang | None
    job: Job | None  # the one that was noted last
    times: Mapping[str, float]
    now: float

    @property
    def quiet(self) -> float:
        """Seconds since any file was written."""
        return max(0.0, self.now - max(self.times.values(), default=0.0))

    @property
    def patience(self) -> float:
        """Seconds without a line after which a run is called silent.

        Before the first report of a start they are BEGIN: what came last then is the start itself,
        the settings, or metrics.jsonl as it was cut to the checkpoint.
        """
        reported, configured = self.times.get("metrics", 0.0), self.times.get("config", 0.0)
        began = max(configured, self.times.get("job", 0.0))
        if reported - began < SAME:
            return BEGIN
        seconds = self.progress.seconds_per_step or 0.0
        return max(LEAST, INTERVALS * seconds * self.settings.report_interval)

    @property
    def is_finished(self) -> bool:
        """Whether the last step was taken, and its checkpoint is complete."""
        newest, last = self.checkpoints.newest, self.settings.num_steps
        return last is not None and newest is not None and newest.step >= last


def judge(facts: Facts) -> tuple[State, str]:
    """The state, and why it is taken for that."""
    end = facts.job.last.end if facts.job else None
    # A run may go on after the last noted end, started by something that notes nothing.
    went_on = max(facts.times.values(), default=0.0) - facts.times.get("job", 0.0) > SAME
    if facts.job and end and not went_on:
        return _ended(facts, facts.job, end)
    if facts.is_finished and (facts.job is None or end or facts.quiet > facts.patience):
        return State.DONE, "the last step's checkpoint is complete"
    if facts.quiet <= facts.patience:
        return State.RUNNING, _running(facts)
    if facts.hang and not facts.hang.over:
        return State.SILENT, facts.hang.what
    noted = "no end was noted: it hangs, was killed, or its first node was lost"
    return State.SILENT, noted if facts.job and not end else "no job has noted how it ended"


def _ended(facts: Facts, job: Job, end: End) -> tuple[State, str]:
    words = f"exit code {end.code}: {end.meaning}"
    if end.code == 0:
        return State.DONE, _done(facts)
    if end.code == AGAIN:
        again = "start it again to go on" if job.id == OUTSIDE else "its launcher requeues it"
        return State.SAVED, f"{words}; {again}"
    if end.code in FINAL or job.id == OUTSIDE:
        return State.FAILED, words
    if job.is_over:
        return State.FAILED, f"{words}; given up after {job.last.restart} restarts"
    return State.WAITING, f"{words}; its launcher requeues it, {job.requeues} times at most"


def _done(facts: Facts) -> str:
    last = facts.settings.num_steps
    if facts.settings.short and last is not None and facts.progress.step < last:
        return f"it ended before step {last:,}, as {facts.settings.short} asked for"
    return "its job has noted that it ended well"


def _running(facts: Facts) -> str:
    if facts.hang and not facts.hang.over:
        return facts.hang.what
    if facts.checkpoints.writing and facts.checkpoints.changed >= facts.times.get("metrics", 0.0):
        return f"{facts.checkpoints.writing} was written to"
    if facts.progress.step == 0:
        return "it has not told of a step yet"
    return "lines come"
