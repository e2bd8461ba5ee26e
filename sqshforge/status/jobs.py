"""Read what a run's jobs have noted in jobs/<job id>.jsonl: their starts, failures and ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sqshforge.status.records import Record, last_records, moment, number, whole

FOLDER = "jobs"
OUTSIDE = "local"  # the job id of a start without Slurm
REQUEUES = 3  # the launchers' default, if none is noted
MOST = 1 << 20  # bytes to read from the end of a file: its last starts
AGAIN, FINAL = 85, (0, 2, 3)  # exit codes after which a launcher always and never requeues


@dataclass(frozen=True, kw_only=True)
class End:
    """How a start ended: its exit code, and the code's meaning in words."""

    code: int
    meaning: str
    time: float | None  # seconds of the epoch, by the node's clock


@dataclass(frozen=True, kw_only=True)
class Training:
    """The end of the first step of a start or restart, and what was lost until then."""

    time: float | None  # seconds of the epoch, by the node's clock
    step: int | None  # the step that it resumed from
    seconds: float  # since the last step before it, or since the job began
    lost: int | None  # steps to repeat
    repeated: float  # seconds that those steps had taken


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure of a rank, what followed it and, once the ranks train again, what it cost."""

    time: float | None  # seconds of the epoch, by the node's clock
    host: str
    code: int | None  # exit code
    why: str
    step: int | None  # the last step taken; None if this start took none
    since: float | None  # when that step ended
    then: str  # restart in place, spare node, requeue, give up, ...
    because: str
    cost: Training | None = None


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a job. It has no end if it runs, was killed or lost its first node."""

    restart: int
    time: float | None  # seconds of the epoch, by the node's clock
    nodes: int | None
    processes: int | None  # per node
    hosts: tuple[str, ...]
    module: str
    run: str
    image: dict[str, str]
    restarts: int | None = None  # restarts in place that are allowed
    spares: int | None = None  # spare nodes
    failures: tuple[Failure, ...] = ()
    trained: tuple[Training, ...] = ()  # one after the start, and one after each restart in place
    end: End | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """All starts of a job, at least one, in order."""

    id: str
    starts: tuple[Start, ...]
    requeues: int  # restarts after which the launcher gives up
    changed: float  # seconds of the epoch, by the file system's clock

    @property
    def last(self) -> Start:
        return self.starts[-1]

    @property
    def failures(self) -> list[Failure]:
        """All failures of all starts, in order."""
        return [one for start in self.starts for one in start.failures]

    def goodput(self, now: float) -> float | None:
        """Return the share of the job's time until `now` that became training which is kept.

        None if it is not noted, as with older images, or before the first step. After a failure,
        the time since the last step does not count as training until training resumes.
        """
        trained = [one for start in self.starts for one in start.trained]
        begun = self.starts[0].time
        if not trained or begun is None or now <= begun:
            return None
        lost = sum(one.seconds + one.repeated for one in trained)
        failures = self.failures
        if failures and failures[-1].cost is None and failures[-1].since is not None:
            lost += max(0.0, now - failures[-1].since)
        return max(0.0, 1.0 - lost / (now - begun))

    @property
    def is_over(self) -> bool:
        """Whether the last start has ended and will not be repeated."""
        end = self.last.end
        if end is None:
            return False
        if self.id == OUTSIDE or end.code in FINAL:
            return True
        return end.code != AGAIN and self.last.restart >= self.requeues


def read(folder: Path) -> list[Job]:
    """Read the jobs of a run's folder, the most recently noted first."""
    found = [job for path in (folder / FOLDER).glob("*.jsonl") if (job := _read(path))]
    return sorted(found, key=lambda job: job.changed, reverse=True)


def _read(path: Path) -> Job | None:
    """Read a job's file; None if it has no complete record of a start."""
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
        elif starts and one.get("kind") == "failure":
            starts[-1] = replace(starts[-1], failures=(*starts[-1].failures, _failure(one)))
        elif starts and one.get("kind") == "training":
            _has_trained(starts, _training(one))
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
    """Read the end of a start from a record; None for other records, or another start's end."""
    code = whole(one.get("code"))
    if one.get("kind") != "end" or code is None or one.get("restart") != start.restart:
        return None
    return End(code=code, meaning=str(one.get("meaning", "")), time=moment(one.get("time")))


def _has_trained(starts: list[Start], training: Training) -> None:
    """Note in `starts` that the last one trains, and what the failure before that has cost."""
    last = starts[-1]
    number = len(starts) - 1 if last.failures or len(starts) == 1 else len(starts) - 2
    failures = starts[number].failures
    if failures and failures[-1].cost is None:
        paid = (*failures[:-1], replace(failures[-1], cost=training))
        starts[number] = replace(starts[number], failures=paid)
    starts[-1] = replace(starts[-1], trained=(*starts[-1].trained, training))


def _failure(one: Record) -> Failure:
    return Failure(
        time=moment(one.get("time")),
        host=str(one.get("host", "")),
        code=whole(one.get("code")),
        why=str(one.get("why", "")),
        step=whole(one.get("step")),
        since=moment(one.get("since")),
        then=str(one.get("then", "")),
        because=str(one.get("because", "")),
    )


def _training(one: Record) -> Training:
    return Training(
        time=moment(one.get("time")),
        step=whole(one.get("step")),
        seconds=number(one.get("seconds")) or 0.0,
        lost=whole(one.get("lost")),
        repeated=number(one.get("repeated")) or 0.0,
    )


def _start(one: Record) -> Start:
    hosts, image = one.get("hosts"), one.get("image")
    return Start(
        restart=whole(one.get("restart")) or 0,
        time=moment(one.get("time")),
        nodes=whole(one.get("nodes")),
        processes=whole(one.get("processes")),
        hosts=tuple(map(str, hosts)) if isinstance(hosts, list) else (),
        module=str(one.get("module", "")),
        run=str(one.get("run", "")),
        image={str(k): str(v) for k, v in image.items()} if isinstance(image, dict) else {},
        restarts=whole(one.get("restarts")),
        spares=whole(one.get("spares")),
    )
