"""The manifest of a checkpoint: written last, so that a checkpoint is complete or absent.

Layout: SAVE/checkpoints/step_<N>_ckp/{manifest.json, .metadata, __<rank>_<i>.distcp}. While it is
written the folder is called step_<N>_ckp.tmp. The manifest has the size and a checksum of every
file; in format 1 only the sizes. No torch needed here.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from training.errors import RequestError

NAME = "manifest.json"
FORMAT = 2
_READABLE = (1, FORMAT)
_COMPLETE = re.compile(r"step_(\d+)_ckp")
_OF_A_RANK = re.compile(r"__(\d+)_")
_TEMPORARY = ".tmp"
_BROKEN = ".broken"
_PIECE = 2**22  # bytes to read at a time


@dataclass(frozen=True)
class File:
    """What a file must match: its size in bytes and, except in format 1, its CRC-32."""

    size: int
    crc32: int | None = None

    @classmethod
    def of(cls, path: Path, take: Callable[[bytes], None] | None = None) -> File:
        """Read a file to its end; each piece is passed to `take`."""
        size = crc32 = 0
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                size, crc32 = size + len(piece), zlib.crc32(piece, crc32)
                if take is not None:
                    take(piece)
        return cls(size, crc32)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds, and what each of its files must match."""

    step: int
    tokens_seen: int
    world_size: int
    model: dict[str, Any]
    data: dict[str, Any]
    torch: str
    files: dict[str, File] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


def checkpoints(save_path: str) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(save_path) / "checkpoints"


def candidates(path: str) -> list[tuple[int, Path]]:
    """Return the checkpoints of a run's folder, newest first; or the one at the path itself.

    The path may also be the folder inside a run's folder that holds the checkpoints.
    """
    found = list(numbered(checkpoints(path))) or list(numbered(Path(path)))
    step = step_of(Path(path).name)
    if found or step is None:
        return found
    return [(step, Path(path))] if Path(path).is_dir() else []


def temporary(save_path: str, step: int) -> Path:
    return checkpoints(save_path) / unfinished(f"step_{step}_ckp")


def unfinished(name: str) -> str:
    """Return the name of a checkpoint's folder until it is complete."""
    return name + _TEMPORARY


def make_anew(folder: Path) -> None:
    """Make the folder of an unfinished checkpoint; an old one is removed, or else renamed."""
    if os.path.lexists(folder) and remove(folder):
        names = (f"{folder.stem}.{number}{_TEMPORARY}" for number in itertools.count(1))
        places = (folder.with_name(name) for name in names)
        folder.rename(next(place for place in places if not os.path.lexists(place)))
    folder.mkdir(parents=True)


def prepare(save_path: str, room: int = 0) -> list[str]:
    """Make the folder, prove that it can be written, and clear what killed runs left behind.

    Returns the faults of what cannot be removed. Raises RequestError naming the folder if it cannot
    be written, or has less than `room` bytes free for a checkpoint.
    """
    folder = checkpoints(save_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        faults = [remove(stale) for stale in folder.glob(f"*{_TEMPORARY}")]
        probe = folder / f"probe{_TEMPORARY}"
        make_anew(probe)
        (probe / "file").write_bytes(b"x")
        shutil.rmtree(probe)
    except OSError as error:
        raise RequestError(
            f"save_ckpt_path: {folder} cannot be written: {error.strerror or error}"
        ) from error
    free = shutil.disk_usage(folder).free
    if free < room:
        raise RequestError(
            f"save_ckpt_path: {folder} has {free:,} bytes free, but a checkpoint takes {room:,}"
        )
    return [fault for fault in faults if fault]


def publish(folder: Path, manifest: Manifest) -> Path:
    """Turn a fully written temporary folder into a checkpoint: manifest, fsync, rename, fsync."""
    with (folder / NAME).open("w") as file:
        json.dump(asdict(manifest), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)
    final = folder.with_name(folder.name.removesuffix(_TEMPORARY))
    if final.exists():  # one that was skipped as broken
        shutil.rmtree(final)
    folder.rename(final)
    _sync(folder.parent)
    return final


def newest(folder: Path, tell: Callable[[str], None]) -> tuple[Path, Manifest] | None:
    """Find the newest complete checkpoint; broken ones are reported and skipped."""
    for _, path in numbered(folder):
        manifest, fault = read(path)
        if manifest is not None:
            return path, manifest
        tell(passed_over(path, fault))
    return None


def passed_over(path: Path | str, fault: str) -> str:
    return f"WARNING: checkpoint {path} is broken ({fault}); it is passed over"


def set_aside(path: Path, save_path: str) -> None:
    """Rename a broken checkpoint in a run's own folder, so that a person can look at it.

    If that fails it stays, and the run replaces it when it reaches its step.
    """
    if path.parent == checkpoints(save_path):
        place = path.with_name(path.name + _BROKEN)
        shutil.rmtree(place, ignore_errors=True)  # one that this run had to set aside before
        with suppress(OSError):
            path.rename(place)


def outdated(steps: Iterable[int], keep: int, every: int = 0) -> set[int]:
    """Return the steps whose checkpoints are not kept: all but the newest `keep`; 0 keeps all.

    Those that `every` divides are kept too, so that a long run can be looked back on.
    """
    older = sorted(steps, reverse=True)[keep:] if keep else []
    return {step for step in older if not every or step % every}


def retain(folder: Path, keep: int, every: int = 0) -> list[str]:
    """Remove the checkpoints that are not kept; return the faults of those that cannot be."""
    found = dict(numbered(folder))
    faults = [
        _remove_complete(found[step]) for step in sorted(outdated(found, keep, every), reverse=True)
    ]
    return [fault for fault in faults if fault]


def _remove_complete(path: Path) -> str:
    """Remove a checkpoint, never leaving half of one under its own name."""
    unfinished = path.with_name(path.name + _TEMPORARY)
    try:
        path.rename(unfinished)
    except OSError as error:
        return f"{path} cannot be removed: {error.strerror}"
    return remove(unfinished)


def remove(path: Path) -> str:
    """Remove a folder, or the link to one; return the fault if that fails, else an empty string."""
    try:
        if path.is_symlink():  # to where somebody moved it
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        return f"{path} cannot be removed: {error.strerror or error}"
    return ""


def numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    """Return every folder that is named like a checkpoint, with its step, newest first."""
    found = [
        (step, path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (step := step_of(path.name)) is not None
    ]
    return iter(sorted(found, reverse=True))


def step_of(name: str) -> int | None:
    """Return the step of the checkpoint with this name; None for any other name."""
    match = _COMPLETE.fullmatch(name)
    return int(match[1]) if match else None


def read(path: Path) -> tuple[Manifest | None, str]:
    """Read a checkpoint's manifest; return None and the fault if the files do not match it."""
    try:
        record = json.loads((path / NAME).read_text())
        if record.get("format", FORMAT) not in _READABLE:
            return None, f"it has format {record['format']}, and this program reads {FORMAT}"
        files = {
            name: File(one) if isinstance(one, int) else File(**one)
            for name, one in record["files"].items()
        }
        manifest = Manifest(**{**record, "files": files})
    except FileNotFoundError:
        return None, f"it has no {NAME}"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return None, f"its {NAME} cannot be read: {error}"
    for name, written in manifest.files.items():
        file = path / name
        try:
            found = file.stat().st_size if file.is_file() else None
        except OSError as error:  # for instance, it is gone by now, or its name is too long
            return None, f"{name} cannot be read: {error.strerror}"
        if found != written.size:
            was = "is missing" if found is None else f"has {found} bytes"
            return None, f"{name} {was}, should have {written.size}"
    return manifest, ""


def listed(path: Path) -> tuple[list[str], str]:
    """Return the files that a manifest lists, existing or not; else none, and the fault."""
    try:
        return sorted(json.loads((path / NAME).read_text())["files"]), ""
    except (OSError, ValueError, TypeError, KeyError) as error:
        return [], f"its {NAME} cannot be read: {error}"


def rotten(path: Path, manifest: Manifest, names: Iterable[str] | None = None) -> str:
    """Name one of a checkpoint's files (of `names`, or of all) that differs from what was written.

    Reads them completely; the result is empty if all match.
    """
    for name in manifest.files if names is None else names:
        written = manifest.files[name]
        try:
            if written.crc32 is not None and File.of(path / name) != written:
                return f"{name} is not what was written: its checksum differs"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return ""


def is_of_all(name: str) -> bool:
    """Return whether a file belongs to no single rank, like the list of all tensors."""
    return _OF_A_RANK.match(name) is None


def share(names: Iterable[str], rank: int, ranks: int) -> list[str]:
    """Return the files that one of `ranks` ranks handles: those that it wrote itself, if any."""
    return [name for name in names if writer(name) % ranks == rank]


def writer(name: str) -> int:
    """Return the rank that wrote a file; rank 0 writes those that belong to all."""
    match = _OF_A_RANK.match(name)
    return int(match[1]) if match else 0


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
