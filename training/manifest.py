"""The manifest of a checkpoint: written last, so that a checkpoint is complete or absent.

Layout: SAVE/checkpoints/step_<N>_ckp/{manifest.json, .metadata, __<rank>_<i>.distcp}. While it is
written the folder is called step_<N>_ckp.tmp. The manifest has the size and a checksum of every
file; in format 1 it has the sizes alone. Light: no torch here.
"""

from __future__ import annotations

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
    return checkpoints(save_path) / f"step_{step}_ckp{_TEMPORARY}"


def prepare(save_path: str, room: int = 0) -> None:
    """Make the folder, prove that it can be written, and clear what killed runs left behind.

    Raises RequestError naming the folder if it cannot be written, or has not `room` bytes for a
    checkpoint.
    """
    folder = checkpoints(save_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(f"*{_TEMPORARY}"):
            shutil.rmtree(stale)
        probe = folder / f"probe{_TEMPORARY}"
        probe.mkdir()
        (probe / "file").write_bytes(b"x")
        shutil.rmtree(probe)
    except OSError as error:
        raise RequestError(
            f"save_ckpt_path: {folder} cannot be written: {error.strerror}"
        ) from error
    free = shutil.disk_usage(folder).free
    if free < room:
        raise RequestError(
            f"save_ckpt_path: {folder} has {free:,} bytes free, and a checkpoint takes {room:,}"
        )


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


def passed_over(path: Path, fault: str) -> str:
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


def retain(folder: Path, keep: int, every: int = 0) -> None:
    """Remove the checkpoints that are kept no longer."""
    found = dict(numbered(folder))
    for path in map(found.__getitem__, outdated(found, keep, every)):
        removed = path.with_name(path.name + _TEMPORARY)  # never half of one under its own name
        path.rename(removed)
        shutil.rmtree(removed)


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
        found = file.stat().st_size if file.is_file() else None
        if found != written.size:
            was = "is missing" if found is None else f"has {found} bytes"
            return None, f"{name} {was}, should have {written.size}"
    return manifest, ""


def listed(path: Path) -> list[str]:
    """Name the files that a checkpoint's manifest lists, whether or not they are there."""
    return list(json.loads((path / NAME).read_text())["files"])


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
