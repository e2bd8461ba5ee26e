"""All that is known of one run at one moment: its files, their clock, its last hang, its state."""

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
HANG_LIMIT = 1 << 20  # bytes of its end that are read: stacks of many ranks are long
REPORTED = re.compile(r"^(?P<when>\d{4}-\d\d-\d\dT\S+)\nhang: (?P<what>.*)$", re.MULTILINE)
ENDED = "it has ended"

LEAST = 300.0  # seconds in which a run that trains may be quiet
INTERVALS = 4  # times as long as a report interval
BEGIN = 1800.0  # seconds that containers, nodes and compilers take before the first report
SAME = 60.0  # seconds between two files that one moment of a run has written

FILES = (metrics.FILE, records.SETTINGS_FILE, jobs.FOLDER, checkpoints.FOLDER, HANG_FILE)


@dataclass(frozen=True)
class Clock:
    """A clock by its distance from this machine's, in seconds, and whose it is.

    The age of a file is asked of the file system that gave it its time: the clock of the node that
    one logs in to may be minutes off. A file without a name is made and asked for its time; it
    leaves nothing, not even a changed folder. File systems without such files (NFS) get one with a
    name for a moment, in a folder above the run's. Where neither can be, this machine's clock has
    to do.
    """

    ahead: float
    whose: str

    @classmethod
    def of(cls, folder: Path) -> Clock:
        """The clock of the file system that a folder is on."""
        before = time.time()
        stamp = _unnamed(folder)
        if stamp is None:
            stamp = _named(folder)
        return cls(0.0, OWN) if stamp is None else cls(stamp - before, THEIRS)

    def now(self) -> float:
        """Seconds of the epoch."""
        return time.time() + self.ahead

    def age(self, moment: float) -> float:
        """Seconds since a moment of this clock; none is less than 0."""
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
    """Ask the nearest folder above, of the same file system, that takes a file."""
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
    """Who hung where, in the watch's words; over once the run has gone on."""

    when: str  # by the clock of the node that reported it
    what: str
    over: bool
    changed: float  # seconds of the epoch, by the file system's clock


def read_hang(folder: Path, reported: float) -> Hang | None:
    """The last hang of a run whose metrics.jsonl was written at `reported`; None without one."""
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
    def silent_after(self) -> float:
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
    """A run's folder, what its files tell, and what follows from that."""

    folder: Path
    state: State
    why: str
    facts: Facts
    jobs: tuple[jobs.Job, ...]  # the one that was noted last first
    clock: Clock
    reported: float | None  # seconds since metrics.jsonl was written
    left: float | None  # seconds to the last step, of one that runs
    goodput: float | None  # share of the last job's time that was training which is kept
    closed: tuple[str, ...]  # files that are there, and that this user may not read

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come by itself."""
        if self.state is State.SAVED:
            return bool(self.jobs) and self.jobs[0].is_over
        return self.state in (State.DONE, State.FAILED)

    @property
    def share(self) -> float | None:
        """Share of its steps that the run has taken."""
        last = self.facts.settings.num_steps
        return self.facts.progress.step / last if last else None

    def document(self) -> dict[str, Any]:
        """Everything, for programs; docs/training/status.md has the keys."""
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
    """Whether a folder is a run's: it tells of steps or jobs, or has a run's config.json."""
    if (folder / metrics.FILE).is_file():
        return True
    if next((folder / jobs.FOLDER).glob("*.jsonl"), None) is not None:
        return True
    return records.has_settings(folder)


def another(job: Job, folder: Path) -> Path | None:
    """The run that a job trains, where that is another one than the folder that noted it."""
    named = Path(job.last.run)
    with suppress(OSError, ValueError):  # it may be another user's, or no path at all
        if named.is_absolute() and is_run(named) and not named.samefile(folder):
            return named
    return None


def _own(noted: list[Job], folder: Path) -> list[Job]:
    """The jobs of a folder that train its own run.

    In a copy all jobs name the run that it was made of: they are its own if there are lines since
    they began.
    """
    written = _written(folder / metrics.FILE) or 0.0
    return [job for job in noted if another(job, folder) is None] or [
        job for job in noted if (job.starts[0].time or 0.0) <= written
    ]


def look(folder: Path, clock: Clock) -> Status:
    """Read a run's files; nothing is written, and none is read that grows, but for its end."""
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
    elif not noted:  # no start can be read there, as on a full disk
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
    """Of a job that is over, until its end; else until now."""
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
