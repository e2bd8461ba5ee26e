"""The manifest of a checkpoint: written last, so that a checkpoint is complete or absent.

Layout: SAVE/checkpoints/step_<N>_ckp/{manifest.json, .metadata, __<rank>_<i>.distcp}. While it is
written the folder is called step_<N>_ckp.tmp. The manifest has the size and a checksum of every
file; in format 1 it has the sizes alone. Light: no torch here.
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
_PIECE = 2**22  # bytes that are read at once


@dataclass(frozen=True)
class File:
    """What a file must be like: its size in bytes and, but in format 1, its CRC-32."""

    size: int
    crc32: int | None = None

    @classmethod
    def of(cls, path: Path, take: Callable[[bytes], None] | None = None) -> File:
        """Read a file to its end; `take` is given each piece of it."""
        size = crc32 = 0
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                size, crc32 = size + len(piece), zlib.crc32(piece, crc32)
                if take is not None:
                    take(piece)
        return cls(size, crc32)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds, and what each of its files must be like."""

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
    """Name the folder that the checkpoints of a run lie in."""
    return Path(save_path) / "checkpoints"


def candidates(path: str) -> list[tuple[int, Path]]:
    """Give the checkpoints of a run's folder, the newest first; or the one that the path is of.

    The path may also be that of the folder in a run's folder that they lie in.
    """
    found = list(numbered(checkpoints(path))) or list(numbered(Path(path)))
    step = step_of(Path(path).name)
    if found or step is None:
        return found
    return [(step, Path(path))] if Path(path).is_dir() else []


def temporary(save_path: str, step: int) -> Path:
    return checkpoints(save_path) / unfinished(f"step_{step}_ckp")


def unfinished(name: str) -> str:
    """Give the name of a checkpoint's folder until it is complete."""
    return name + _TEMPORARY


def make_anew(folder: Path) -> None:
    """Make the folder of an unfinished checkpoint; what of one cannot be removed is renamed."""
    if os.path.lexists(folder) and remove(folder):
        names = (f"{folder.stem}.{number}{_TEMPORARY}" for number in itertools.count(1))
        places = (folder.with_name(name) for name in names)
        folder.rename(next(place for place in places if not os.path.lexists(place)))
    folder.mkdir(parents=True)


def prepare(save_path: str, room: int = 0) -> list[str]:
    """Make the folder, prove that it can be written, and clear what killed runs left behind.

    Gives the faults of what cannot be removed. Raises RequestError naming the folder if it cannot
    be written, or has not `room` bytes for a checkpoint.
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
            f"save_ckpt_path: {folder} has {free:,} bytes free, and a checkpoint takes {room:,}"
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
    if final.exists():  # one that was passed over as broken
        shutil.rmtree(final)
    folder.rename(final)
    _sync(folder.parent)
    return final


def newest(folder: Path, tell: Callable[[str], None]) -> tuple[Path, Manifest] | None:
    """Find the newest complete checkpoint; each broken one is reported and passed over."""
    for _, path in numbered(folder):
        manifest, fault = read(path)
        if manifest is not None:
            return path, manifest
        tell(passed_over(path, fault))
    return None


def passed_over(path: Path | str, fault: str) -> str:
    return f"WARNING: checkpoint {path} is broken ({fault}); it is passed over"


def set_aside(path: Path, save_path: str) -> None:
    """Give a broken checkpoint of a run's own folder another name, for a person to look at.

    Where that cannot be done it stays, and the run replaces it when it reaches its step.
    """
    if path.parent == checkpoints(save_path):
        place = path.with_name(path.name + _BROKEN)
        shutil.rmtree(place, ignore_errors=True)  # one that this run had to set aside before
        with suppress(OSError):
            path.rename(place)


def outdated(steps: Iterable[int], keep: int, every: int = 0) -> set[int]:
    """Give the steps whose checkpoints are kept no longer: all but the newest `keep`; 0 keeps all.

    Those that `every` divides stay too, so that a long run can be looked back on.
    """
    older = sorted(steps, reverse=True)[keep:] if keep else []
    return {step for step in older if not every or step % every}


def retain(folder: Path, keep: int, every: int = 0) -> list[str]:
    """Remove the checkpoints that are kept no longer; give the faults of what cannot be removed."""
    found = dict(numbered(folder))
    faults = [
        _remove_complete(found[step]) for step in sorted(outdated(found, keep, every), reverse=True)
    ]
    return [fault for fault in faults if fault]


def _remove_complete(path: Path) -> str:
    """Never leave half of one under its own name."""
    unfinished = path.with_name(path.name + _TEMPORARY)
    try:
        path.rename(unfinished)
    except OSError as error:
        return f"{path} cannot be removed: {error.strerror}"
    return remove(unfinished)


def remove(path: Path) -> str:
    """Remove a folder, or the link to one; give the fault if that cannot be done, else nothing."""
    try:
        if path.is_symlink():  # to where somebody has moved it
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        return f"{path} cannot be removed: {error.strerror or error}"
    return ""


def numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    """Every folder that is called like a checkpoint, with its step, the newest first."""
    found = [
        (step, path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (step := step_of(path.name)) is not None
    ]
    return iter(sorted(found, reverse=True))


def step_of(name: str) -> int | None:
    """Tell of which step the checkpoint of this name is; None if none is called so."""
    match = _COMPLETE.fullmatch(name)
    return int(match[1]) if match else None


def read(path: Path) -> tuple[Manifest | None, str]:
    """Read a checkpoint's manifest; None and the fault if the files do not agree with it."""
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
        except OSError as error:  # as where it is gone since, or its name is too long
            return None, f"{name} cannot be read: {error.strerror}"
        if found != written.size:
            was = "is missing" if found is None else f"has {found} bytes"
            return None, f"{name} {was}, should have {written.size}"
    return manifest, ""


def listed(path: Path) -> tuple[list[str], str]:
    """Name the files that a checkpoint's manifest lists, there or not; none and the fault else."""
    try:
        return sorted(json.loads((path / NAME).read_text())["files"]), ""
    except (OSError, ValueError, TypeError, KeyError) as error:
        return [], f"its {NAME} cannot be read: {error}"


def rotten(path: Path, manifest: Manifest, names: Iterable[str] | None = None) -> str:
    """Tell which of a checkpoint's files (of these, or of all) holds other bytes than were written.

    Reads them whole; empty if none does.
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
    """Tell whether a file belongs to no rank alone, as the list of all tensors does."""
    return _OF_A_RANK.match(name) is None


def share(names: Iterable[str], rank: int, ranks: int) -> list[str]:
    """Give the files that one of so many ranks looks after: what it wrote itself, if it did."""
    return [name for name in names if writer(name) % ranks == rank]


def writer(name: str) -> int:
    """Tell which rank wrote a file; rank 0 writes those that belong to all."""
    match = _OF_A_RANK.match(name)
    return int(match[1]) if match else 0


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
