"""The manifest of a checkpoint: written last, so that a checkpoint is complete or absent.

Layout: SAVE/checkpoints/step_<N>_ckp/{manifest.json, .metadata, __<rank>_<i>.distcp}. While it is
written the folder is called step_<N>_ckp.tmp. Light: no torch here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from training.errors import RequestError

NAME = "manifest.json"
FORMAT = 1
_COMPLETE = re.compile(r"step_(\d+)_ckp")
_TEMPORARY = ".tmp"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds, and the size in bytes of each of its files."""

    step: int
    tokens_seen: int
    world_size: int
    model: dict[str, Any]
    data: dict[str, Any]
    torch: str
    files: dict[str, int]
    settings: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


def checkpoints(save_path: str) -> Path:
    """Name the folder that the checkpoints of a run lie in."""
    return Path(save_path) / "checkpoints"


def temporary(save_path: str, step: int) -> Path:
    return checkpoints(save_path) / f"step_{step}_ckp{_TEMPORARY}"


def prepare(save_path: str) -> None:
    """Make the folder, prove that it can be written, and clear what killed runs left behind.

    Raises RequestError naming the folder if it cannot be written.
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


def publish(folder: Path, manifest: Callable[[dict[str, int]], Manifest]) -> Path:
    """Turn a fully written temporary folder into a checkpoint: manifest, fsync, rename, fsync."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    with (folder / NAME).open("w") as file:
        json.dump(asdict(manifest(sizes)), file, indent=2)
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
    """Find the newest complete checkpoint; each broken one is told and passed over."""
    for _, path in _numbered(folder):
        manifest, fault = read(path)
        if manifest is not None:
            return path, manifest
        tell(f"WARNING: checkpoint {path} is broken ({fault}); it is passed over")
    return None


def retain(folder: Path, keep: int, every: int = 0) -> None:
    """Remove all but the newest `keep` checkpoints; 0 keeps all.

    Those of steps that `every` divides stay too, so that a long run can be looked back on.
    """
    for step, path in list(_numbered(folder))[keep:] if keep else []:
        if every and step % every == 0:
            continue
        doomed = path.with_name(path.name + _TEMPORARY)  # never half of one under its own name
        path.rename(doomed)
        shutil.rmtree(doomed)


def _numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    """Every folder that is called like a checkpoint, with its step, the newest first."""
    found = [
        (int(match[1]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _COMPLETE.fullmatch(path.name))
    ]
    return iter(sorted(found, reverse=True))


def read(path: Path) -> tuple[Manifest | None, str]:
    """Read a checkpoint's manifest; None and the fault if the files do not agree with it."""
    try:
        manifest = Manifest(**json.loads((path / NAME).read_text()))
    except FileNotFoundError:
        return None, f"it has no {NAME}"
    except (OSError, ValueError, TypeError) as error:
        return None, f"its {NAME} cannot be read: {error}"
    if manifest.format != FORMAT:
        return None, f"it has format {manifest.format}, and this program reads {FORMAT}"
    for name, size in manifest.files.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            was = "is missing" if found is None else f"has {found} bytes"
            return None, f"{name} {was}, should have {size}"
    return manifest, ""


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
