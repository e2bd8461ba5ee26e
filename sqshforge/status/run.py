"""Everything about one run at one moment: its files, their clock, its last hang, its state."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from sqshforge.status import checkpoints, jobs, metrics, records
from sqshforge.status.checkpoints import Checkpoints
from sqshforge.status.jobs import AGAIN, FINAL, OUTSIDE, End, Job
from sqshforge.status.metrics import Progress
from sqshforge.status.records import Settings

OWN = "this machine's clock"
THEIRS = "the file system's clock"

HANG_FILE = "hang.txt"
HANG_LIMIT = 1 << 20  # bytes to read from its end: the stacks of many ranks are long
REPORTED = re.compile(r"^(?P<when>\d{4}-\d\d-\d\dT\S+)\nhang: (?P<what>.*)$", re.MULTILINE)
ENDED = "it has ended"

LEAST = 300.0  # seconds that any run in training may be quiet
INTERVALS = 4  # report intervals that a run in training may be quiet
BEGIN = 1800.0  # seconds for containers, nodes and compilers before the first report
SAME = 60.0  # seconds within which two files count as written at the same time

FILES = (metrics.FILE, records.SETTINGS_FILE, jobs.FOLDER, checkpoints.FOLDER, HANG_FILE)


@dataclass(frozen=True)
class Clock:
    """A clock: how many seconds it is ahead of this machine's, and whose it is.

    The age of a file must be measured by the clock of its file system, as the login node's may be
    minutes off. The time is that of a new unnamed file, which leaves no trace, not even a changed
    folder. On file systems without unnamed files (NFS), a named file is made for a moment in a
    folder above the run's. If neither is possible, this machine's clock is used.
    """

    ahead: float
    whose: str

    @classmethod
    def of(cls, folder: Path) -> Clock:
        """Return the clock of a folder's file system."""
        before = time.time()
        stamp = _unnamed(folder)
        if stamp is None:
            stamp = _named(folder)
        return cls(0.0, OWN) if stamp is None else cls(stamp - before, THEIRS)

    def now(self) -> float:
        """Return the current time in seconds of the epoch."""
        return time.time() + self.ahead

    def age(self, moment: float) -> float:
        """Return the seconds since a time of this clock, at least 0."""
        return max(0.0, self.now() - moment)


def _unnamed(folder: Path) -> float | None:
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
    except OSError:
        return None
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def _named(folder: Path) -> float | None:
    """Return the time of a file made in the nearest writable parent on the same file system."""
    try:
        folder = folder.resolve()
        device = folder.stat().st_dev
        for above in folder.parents:
            if above.stat().st_dev != device:
                return None
            if os.access(above, os.W_OK | os.X_OK):
                with tempfile.NamedTemporaryFile(prefix=".sqshforge-clock-", dir=above) as file:
                    return os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
    return None


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Which ranks hung and where, in the watch's words; over once the run has gone on."""

    when: str  # by the clock of the node that reported it
    what: str
    over: bool
    changed: float  # seconds of the epoch, by the file system's clock


def read_hang(folder: Path, reported: float) -> Hang | None:
    """Read the last hang of a run whose metrics.jsonl was written at `reported`; None if none."""
    path = folder / HANG_FILE
    with suppress(OSError), records.opened(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - HANG_LIMIT))
        found = list(REPORTED.finditer(file.read(HANG_LIMIT).decode(errors="replace")))
        changed = path.stat().st_mtime
        hangs = [one for one in found if not one["what"].startswith(ENDED)]
        if hangs:
            return Hang(
                when=hangs[-1]["when"],
                what=hangs[-1]["what"],
                over=found[-1] is not hangs[-1] or reported > changed,
                changed=changed,
            )
    return None


class State(str, Enum):
    """The state of a run."""

    RUNNING = "running"
    WAITING = "waiting"  # for its next start, after a failure
    SAVED = "saved"  # stopped by a signal, after a checkpoint
    DONE = "done"
    FAILED = "failed"  # and will not be started again
    SILENT = "silent"  # quiet for long, without a noted end


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts by which a run's state is judged.

    `times` says for each kind of file when it was last written, in seconds of the epoch by the file
    system's clock; `now` is by the same clock.
    """

    settings: Settings
    progress: Progress
    checkpoints: Checkpoints
    hang: Hang | None
    job: Job | None  # the most recently noted
    times: Mapping[str, float]
    now: float

    @property
    def quiet(self) -> float:
        """Seconds since a file was last written."""
        return max(0.0, self.now - max(self.times.values(), default=0.0))

    @property
    def silent_after(self) -> float:
        """Seconds of quiet after which a run counts as silent.

        Before the first report of a start they are BEGIN: the last thing written then is the note
        of the start, the settings, or metrics.jsonl when it was cut back to the checkpoint.
        """
        reported, configured = self.times.get("metrics", 0.0), self.times.get("config", 0.0)
        began = max(configured, self.times.get("job", 0.0))
        if reported - began < SAME:
            return BEGIN
        seconds = self.progress.seconds_per_step or 0.0
        return max(LEAST, INTERVALS * seconds * self.settings.report_interval)

    @property
    def is_finished(self) -> bool:
        """Whether the last step was taken and its checkpoint is complete."""
        newest, last = self.checkpoints.newest, self.settings.num_steps
        return last is not None and newest is not None and newest.step >= last


def judge(facts: Facts) -> tuple[State, str]:
    """Return a run's state, and the reason for it."""
    end = facts.job.last.end if facts.job else None
    # A run may go on after the last noted end, started by something that notes nothing.
    went_on = max(facts.times.values(), default=0.0) - facts.times.get("job", 0.0) > SAME
    if facts.job and end and not went_on:
        return _ended(facts, facts.job, end)
    if facts.is_finished and (facts.job is None or end or facts.quiet > facts.silent_after):
        return State.DONE, "the last step's checkpoint is complete"
    if facts.quiet <= facts.silent_after:
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
    left = job.requeues - job.last.restart
    times = f"{left} time{'' if left == 1 else 's'}"
    return State.WAITING, f"{words}; its launcher requeues it, {times} more at most"


def _done(facts: Facts) -> str:
    last = facts.settings.num_steps
    if facts.settings.short and last is not None and facts.progress.step < last:
        return f"it ended before step {last:,}, as {facts.settings.short} asked for"
    return "its job has noted that it ended well"


def _running(facts: Facts) -> str:
    if facts.hang and not facts.hang.over:
        return facts.hang.what
    failures = facts.job.last.failures if facts.job else ()
    if failures and failures[-1].cost is None:
        return f"{failures[-1].then} after a failure: {failures[-1].why}"
    if facts.checkpoints.writing and facts.checkpoints.changed >= facts.times.get("metrics", 0.0):
        return f"{facts.checkpoints.writing} was written to"
    if facts.progress.step == 0:
        return "it has not reported a step yet"
    return "lines come"


@dataclass(frozen=True, kw_only=True)
class Status:
    """A run's folder, the facts from its files, and what follows from them."""

    folder: Path
    state: State
    why: str
    facts: Facts
    jobs: tuple[jobs.Job, ...]  # the most recently noted first
    clock: Clock
    reported: float | None  # seconds since metrics.jsonl was written
    left: float | None  # seconds to the last step, if the run is running
    goodput: float | None  # share of the last job's time that became training which is kept
    closed: tuple[str, ...]  # existing files that this user may not read

    @property
    def is_over(self) -> bool:
        """Whether the run will not go on by itself."""
        if self.state is State.SAVED:
            return bool(self.jobs) and self.jobs[0].is_over
        return self.state in (State.DONE, State.FAILED)

    @property
    def share(self) -> float | None:
        """The share of its steps that the run has taken."""
        last = self.facts.settings.num_steps
        return self.facts.progress.step / last if last else None

    def document(self) -> dict[str, Any]:
        """Return everything for the JSON output; docs/training/status.md lists the keys."""
        facts = self.facts
        return {
            "folder": str(self.folder),
            "state": self.state.value,
            "why": self.why,
            "over": self.is_over,
            "share": self.share,
            "seconds_left": self.left,
            "seconds_since_report": self.reported,
            "seconds_quiet": facts.quiet,
            "seconds_until_silent": facts.silent_after,
            "clock": self.clock.whose,
            "closed": list(self.closed),
            "settings": asdict(facts.settings),
            "progress": asdict(facts.progress),
            "checkpoints": asdict(facts.checkpoints),
            "goodput": self.goodput,
            "hang": asdict(facts.hang) if facts.hang else None,
            "jobs": [asdict(job) for job in self.jobs],
        }


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's: it has metrics, noted jobs or a run's config.json."""
    if (folder / metrics.FILE).is_file():
        return True
    if next((folder / jobs.FOLDER).glob("*.jsonl"), None) is not None:
        return True
    return records.has_settings(folder)


def another(job: Job, folder: Path) -> Path | None:
    """Return the run that a job trains, if it is not the folder that noted the job; else None."""
    named = Path(job.last.run)
    with suppress(OSError, ValueError):  # it may be another user's, or not a valid path
        if named.is_absolute() and is_run(named) and not named.samefile(folder):
            return named
    return None


def _own(noted: list[Job], folder: Path) -> list[Job]:
    """Return the jobs noted in a folder that train its own run.

    In a copy of a run's folder, all jobs name the original: they then count as its own if
    metrics.jsonl was written after they began.
    """
    written = _written(folder / metrics.FILE) or 0.0
    return [job for job in noted if another(job, folder) is None] or [
        job for job in noted if (job.starts[0].time or 0.0) <= written
    ]


def look(folder: Path, clock: Clock) -> Status:
    """Read a run's files; nothing is written, and of files that grow only the end is read."""
    settings = records.read_settings(folder)
    times = {
        name: time
        for name, file in (("metrics", metrics.FILE), ("config", records.SETTINGS_FILE))
        if (time := _written(folder / file)) is not None
    }
    how_far = metrics.read(folder, settings)
    kept = checkpoints.read(folder)
    if kept.changed > 0:
        times["checkpoint"] = kept.changed
    noted = jobs.read(folder)
    known = _own(noted, folder)
    if known:
        times["job"] = known[0].changed
    elif not noted:  # no start can be read, as after a full disk
        for path in (folder / jobs.FOLDER).glob("*.jsonl"):
            times["job"] = max(times.get("job", 0.0), _written(path) or 0.0)
    facts = Facts(
        settings=settings,
        progress=how_far,
        checkpoints=kept,
        hang=read_hang(folder, times.get("metrics", 0.0)),
        job=known[0] if known else None,
        times=times,
        now=clock.now(),
    )
    state, why = judge(facts)
    reported = clock.age(times["metrics"]) if "metrics" in times else None
    is_running = state is State.RUNNING and reported is not None
    return Status(
        folder=folder,
        state=state,
        why=why,
        facts=facts,
        jobs=tuple(known),
        clock=clock,
        reported=reported,
        goodput=_goodput(known[0], state, clock) if known else None,
        left=how_far.seconds_left(settings.num_steps, reported or 0.0) if is_running else None,
        closed=tuple(name for name in FILES if _is_closed(folder / name)),
    )


def _goodput(job: Job, state: State, clock: Clock) -> float | None:
    """Return a job's goodput until its end if it is over, else until now."""
    end = job.last.end
    over = state in (State.DONE, State.FAILED, State.SAVED) and end is not None
    return job.goodput(end.time if over and end and end.time else clock.now())


def _is_closed(path: Path) -> bool:
    return path.exists() and not os.access(path, os.R_OK)


def _written(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
