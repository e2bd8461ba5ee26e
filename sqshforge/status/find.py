"""Find runs, and the one that a name, folder or job id refers to."""

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
DEPTH = 2  # how many levels below a root runs are looked for


@dataclass(frozen=True)
class Found:
    """A run, and the job that was asked for, if any."""

    folder: Path
    job: str = ""


def roots(given: Sequence[Path], environment: Mapping[str, str]) -> list[Path]:
    """Return where to look for runs: the given folders, those of SQSHFORGE_RUNS, or the default."""
    if given:
        return list(given)
    named = [Path(one) for one in environment.get(VARIABLE, "").split(os.pathsep) if one]
    return named or [Path("checkpoints"), Path()]


def runs(below: Sequence[Path]) -> list[Path]:
    """Return all runs below these folders, each once."""
    found: dict[Path, Path] = {}
    for root in below:
        for folder in map(_home, _below(root, DEPTH)):
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def one(what: str, below: Sequence[Path]) -> Found:
    """Return the run for a folder, a job id, or a name below the roots.

    Raises `RequestError`, which names the places searched.
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
    """Return the run that a folder belongs to: itself, or the one that a job noted there trains.

    A job's flags may name another folder to save to, also in a folder that has an older run.
    Without `job`, a folder with metrics is its own run; else the last job that names one counts.
    """
    if not job and _is_file(folder / metrics.FILE):
        return folder
    noted = (one for one in jobs.read(folder) if one.last.run and job in ("", one.id))
    last = next(noted, None)
    return (another(last, folder) if last else None) or folder


def _is_file(path: Path) -> bool:
    """Whether a path is a file; False if folders above it are closed to this user."""
    with suppress(OSError):
        return path.is_file()
    return False


def _is_run(folder: Path) -> bool:
    """Whether a folder is a run; False if it is closed to this user."""
    with suppress(OSError):
        return is_run(folder)
    return False


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder; False for links in a loop or into a closed folder."""
    with suppress(OSError):
        return entry.is_dir()
    return False


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the runs in a folder and below; a run is not searched for others."""
    if _is_run(folder):
        yield folder
        return
    try:
        inside = sorted(one.name for one in os.scandir(folder) if _is_folder(one)) if depth else []
    except OSError:  # it does not exist, or belongs to another user
        return
    for name in inside:
        if not name.startswith("."):
            yield from _below(folder / name, depth - 1)
