"""All that is known of one run at one moment."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqshforge.status import checkpoints, hang, jobs, metrics, records
from sqshforge.status.clock import Clock
from sqshforge.status.state import Facts, State, judge

FILES = (metrics.FILE, records.FILE, jobs.FOLDER, checkpoints.FOLDER, hang.FILE)


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
        """Everything, for programs; docs/status.md has the keys."""
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
            "seconds_of_patience": facts.patience,
            "clock": self.clock.whose,
            "closed": list(self.closed),
            "settings": asdict(facts.settings),
            "progress": asdict(facts.progress),
            "checkpoints": asdict(facts.checkpoints),
            "hang": asdict(facts.hang) if facts.hang else None,
            "jobs": [asdict(job) for job in self.jobs],
        }


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's: it tells of steps or jobs, or has a run's config.json."""
    if (folder / metrics.FILE).is_file():
        return True
    if next((folder / jobs.FOLDER).glob("*.jsonl"), None) is not None:
        return True
    return records.there(folder)


def look(folder: Path, clock: Clock) -> Status:
    """Read a run's files; nothing is written, and none is read that grows, but for its end."""
    told = records.read(folder)
    times = {
        name: time
        for name, file in (("metrics", metrics.FILE), ("config", records.FILE))
        if (time := _written(folder / file)) is not None
    }
    how_far = metrics.read(folder, told)
    kept = checkpoints.read(folder)
    times["checkpoint"] = kept.changed
    known = jobs.read(folder)
    if known:
        times["job"] = known[0].changed
    facts = Facts(
        settings=told,
        progress=how_far,
        checkpoints=kept,
        hang=hang.read(folder, times.get("metrics", 0.0)),
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
        left=how_far.seconds_left(told.num_steps, reported or 0.0) if is_running else None,
        closed=tuple(name for name in FILES if _is_closed(folder / name)),
    )


def _is_closed(path: Path) -> bool:
    return path.exists() and not os.access(path, os.R_OK)


def _written(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
