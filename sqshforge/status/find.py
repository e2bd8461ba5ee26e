"""Which runs there are, and which one is meant."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqshforge.errors import RequestError
from sqshforge.status import jobs, metrics
from sqshforge.status.run import another, is_run

VARIABLE = "SQSHFORGE_RUNS"
DEPTH = 2  # folders below a root in which runs are looked for


@dataclass(frozen=True)
class Found:
    """A run, and the job that was asked for, if one was."""

    folder: Path
    job: str = ""


def roots(given: Sequence[Path], environment: Mapping[str, str]) -> list[Path]:
    """Where runs are looked for: as asked for, as the variable says, or here."""
    if given:
        return list(given)
    named = [Path(one) for one in environment.get(VARIABLE, "").split(os.pathsep) if one]
    return named or [Path("checkpoints"), Path()]


def runs(below: Sequence[Path]) -> list[Path]:
    """All runs below these folders, each once."""
    found: dict[Path, Path] = {}
    for root in below:
        for folder in map(_home, _below(root, DEPTH)):
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def one(what: str, below: Sequence[Path]) -> Found:
    """The run that is meant by a folder, a job's id or a name below the roots.

    Raises `RequestError` with what was looked at.
    """
    folder = Path(what)
    if folder.is_dir() and is_run(folder):
        return Found(_home(folder))
    if "/" not in what:
        for run in (run for root in below for run in _below(root, DEPTH)):
            if _is_file(run / jobs.FOLDER / f"{what}.jsonl"):
                return Found(_home(run, what), what)
        for root in below:
            if _is_run(root / what):
                return Found(_home(root / what))
    if folder.is_dir():
        raise RequestError(
            f"{what} is not a run's folder: it has no metrics.jsonl, no jobs/ID.jsonl and no "
            "config.json of a run",
            fix=f"sqshforge status --root {shlex.quote(what)} lists the runs below it",
        )
    looked = [str(folder.absolute())]
    if "/" not in what:
        places = ", ".join(str(root.absolute()) for root in below)
        looked.append(f"jobs/{what}.jsonl of the runs in {places}")
    raise RequestError(
        f"there is no run and no job {what}",
        where="; ".join(looked),
        fix=f"name the run's folder, or where runs are: --root DIR, or {VARIABLE}=DIR:DIR",
    )


def _home(folder: Path, job: str = "") -> Path:
    """The run that a folder is of, or that a job noted there trains, the last one if none is named.

    The job's flags may name another folder to save to, also one beside an older run.
    """
    if not job and _is_file(folder / metrics.FILE):
        return folder
    noted = (one for one in jobs.read(folder) if one.last.run and job in ("", one.id))
    last = next(noted, None)
    return (another(last, folder) if last else None) or folder


def _is_file(path: Path) -> bool:
    """Whether there is one that may be seen: folders above it may be another user's."""
    with suppress(OSError):
        return path.is_file()
    return False


def _is_run(folder: Path) -> bool:
    """Whether a folder is a run that may be seen: it may be another user's."""
    with suppress(OSError):
        return is_run(folder)
    return False


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is one, and not a link that cannot be followed: a loop, or into a closed one."""
    with suppress(OSError):
        return entry.is_dir()
    return False


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """Runs in a folder and below; a run has none inside."""
    if _is_run(folder):
        yield folder
        return
    try:
        inside = sorted(one.name for one in os.scandir(folder) if _is_folder(one)) if depth else []
    except OSError:  # it is not there, or another user's
        return
    for name in inside:
        if not name.startswith("."):
            yield from _below(folder / name, depth - 1)
