"""The versions that must be the same on all nodes."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from pathlib import Path

import training
from training.job.preflight import efa

LOCK = "sqshforge/meta/lock.json"  # what the image was made of
DRIVERS = ("nvidia", "efa", "neuron")  # modules of the kernel
NONE = "none"


def read(root: Path, environment: Mapping[str, str], probe: Mapping[str, str]) -> dict[str, str]:
    """Collect them; `probe` has those of torch, from a process that has loaded it."""
    lock = root / LOCK
    found = {
        "python": platform.python_version(),
        **{name: probe.get(name, "") for name in ("torch", "cuda", "nccl")},
        "libfabric": efa.libfabric(environment),
        "image": _digest(lock.read_bytes()) if lock.is_file() else "",
        "training": _digest(_sources(Path(training.__file__).parent)),
    }
    for driver in DRIVERS:
        place = root / "sys/module" / driver / "version"
        found[f"{driver} driver"] = place.read_text().strip() if place.is_file() else ""
    return {name: value or NONE for name, value in found.items()}


def _sources(folder: Path) -> bytes:
    """Every source of the package with its name, in an order of their own."""
    parts = []
    for path in sorted(folder.rglob("*.py")):
        data = path.read_bytes()
        parts.append(f"{path.relative_to(folder)} {len(data)}\n".encode() + data)
    return b"".join(parts)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
