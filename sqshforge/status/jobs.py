"""What the jobs of a run have noted in jobs/<job id>.jsonl: their starts, and how these ended."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sqshforge.status.records import Record, last_records, number, whole

FOLDER = "jobs"
OUTSIDE = "local"  # the id of what was started without Slurm
REQUEUES = 3  # of the launchers, where none is noted
MOST = 1 << 20  # bytes of a file that are read: its last starts
AGAIN, FINAL = 85, (0, 2, 3)  # exit codes that a launcher always, and never, tries again


@dataclass(frozen=True, kw_only=True)
class End:
    """How a start ended: its exit code and what that means in words."""

    code: int
    meaning: str
    time: float | None  # seconds of the epoch, by the node's clock


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a job; no end is noted of one that runs, was killed or lost its first node."""

    restart: int
    time: float | None  # seconds of the epoch, by the node's clock
    nodes: int | None
    processes: int | None  # of a node
    hosts: tuple[str, ...]
    module: str
    run: str
    image: dict[str, str]
    end: End | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """All the starts of a job, in their order; there is at least one."""

    id: str
    starts: tuple[Start, ...]
    requeues: int  # restarts after which the launcher gives up
    changed: float  # seconds of the epoch, by the file system's clock

    @property
    def last(self) -> Start:
        return self.starts[-1]

    @property
    def is_over(self) -> bool:
        """Whether the last start has ended and is not made again."""
        end = self.last.end
        if end is None:
            return False
        if self.id == OUTSIDE or end.code in FINAL:
            return True
        return end.code != AGAIN and self.last.restart >= self.requeues


def read(folder: Path) -> list[Job]:
    """The jobs of a run's folder, the one that was noted last first."""
    found = [job for path in (folder / FOLDER).glob("*.jsonl") if (job := _read(path))]
    return sorted(found, key=lambda job: job.changed, reverse=True)


def _read(path: Path) -> Job | None:
    """A job's file; None where it has no whole line about a start."""
    try:
        changed = path.stat().st_mtime
    except OSError:
        return None
    starts: list[Start] = []
    requeues = None
    for one in last_records(path, MOST):
        if one.get("kind") == "start":
            starts.append(_start(one))
            requeues = whole(one.get("requeues"))
        elif starts and (end := _end(one, starts[-1])) is not None:
            starts[-1] = replace(starts[-1], end=end)
    if not starts:
        return None
    return Job(
        id=path.stem,
        starts=tuple(starts),
        requeues=REQUEUES if requeues is None else requeues,
        changed=changed,
    )


def _end(one: Record, start: Start) -> End | None:
    """What a record says of the end of a start; None for what is none, or of another."""
    code = whole(one.get("code"))
    if one.get("kind") != "end" or code is None or one.get("restart") != start.restart:
        return None
    return End(code=code, meaning=str(one.get("meaning", "")), time=number(one.get("time")))


def _start(one: Record) -> Start:
    hosts, image = one.get("hosts"), one.get("image")
    return Start(
        restart=whole(one.get("restart")) or 0,
        time=number(one.get("time")),
        nodes=whole(one.get("nodes")),
        processes=whole(one.get("processes")),
        hosts=tuple(map(str, hosts)) if isinstance(hosts, list) else (),
        module=str(one.get("module", "")),
        run=str(one.get("run", "")),
        image={str(k): str(v) for k, v in image.items()} if isinstance(image, dict) else {},
    )
