"""The checkpoints of a run, ours or Composer's: which are complete, and how large they are."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqshforge.status.records import opened, read_document, whole

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
OURS = re.compile(r"step_(\d+)_ckp(?:\.tmp)?")
COMPOSER = re.compile(r"ep\d+-ba(\d+)-rank0\.pt")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    path: str
    bytes: int
    made: float  # seconds of the epoch, by the file system's clock


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The newest complete checkpoint, their number, and what is wrong with newer ones."""

    newest: Checkpoint | None = None
    count: int = 0
    broken: tuple[str, ...] = ()
    writing: str = ""  # name of the one being written, or left behind by a run that was killed
    changed: float = 0.0  # seconds of the epoch: when a checkpoint was last written to


def read(folder: Path) -> Checkpoints:
    """Examine a run's checkpoints, newest first, until one is complete.

    Only sizes are compared with the manifest, as reading a checkpoint takes long. A file of
    Composer is complete if it has its end, which is written last.
    """
    found = sorted(_found(folder), reverse=True)
    whole_ones = [(step, path) for step, path in found if path.suffix != ".tmp"]
    newest: Checkpoint | None = None
    faults: dict[Path, str] = {}
    for step, path in whole_ones:
        size, fault = _composer(path) if path.suffix == ".pt" else _ours(path)
        if not fault:
            newest = Checkpoint(step=step, path=str(path), bytes=size, made=_made(path))
            break
        faults[path] = fault
    # A .tmp older than the newest checkpoint is being removed, not written.
    since = newest.step if newest else -1
    writing = [path for step, path in found if path.suffix == ".tmp" and step > since]
    changed = [_changed(path) for path in (*writing, *faults)] + ([newest.made] if newest else [])
    return Checkpoints(
        newest=newest,
        count=len(whole_ones) - len(faults),
        broken=tuple(f"{path.name}: {fault}" for path, fault in faults.items()),
        writing=writing[0].name if writing else "",
        changed=max(changed, default=0.0),
    )


def _found(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield everything that is named like a checkpoint, with its step."""
    for place, name in ((folder / FOLDER, OURS), (folder, COMPOSER)):
        with suppress(OSError):
            for path in place.iterdir():
                if match := name.fullmatch(path.name):
                    yield int(match[1]), path


def _ours(path: Path) -> tuple[int, str]:
    """Return the bytes of a checkpoint's files, and what is wrong with it, or ""."""
    manifest = read_document(path / MANIFEST)
    files = manifest.get("files") if manifest else None
    if not isinstance(files, dict):
        try:
            is_absent = not (path / MANIFEST).exists()
        except OSError:  # the folder belongs to another user
            is_absent = False
        return 0, f"it has no {MANIFEST}" if is_absent else f"its {MANIFEST} cannot be read"
    total = 0
    for name, file in files.items():
        size = whole(file.get("size") if isinstance(file, dict) else file)  # format 2, format 1
        try:
            has = (path / name).stat().st_size
        except (OSError, ValueError):  # ValueError: not a valid file name
            return 0, f"{name} is missing"
        if has != size:
            return 0, f"{name} has {has} bytes, should have {size}"
        total += has
    return total, ""


def _composer(path: Path) -> tuple[int, str]:
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            return size, "" if zipfile.is_zipfile(file) else "it is cut off, or being written"
    except OSError as error:
        return 0, f"it cannot be read: {error.strerror}"


def _made(path: Path) -> float:
    """Return when a checkpoint was completed."""
    with suppress(OSError):
        return (path if path.suffix == ".pt" else path / MANIFEST).stat().st_mtime
    return 0.0


def _changed(path: Path) -> float:
    """Return when a file, or a folder or a file in it, was last written."""
    times = [0.0]
    with suppress(OSError):
        times.append(path.stat().st_mtime)
        times += [one.stat().st_mtime for one in path.iterdir()]
    return max(times)
