"""Free space on the node's own disks; that of the shared folder is no node's fault.

A full shared folder is found by the training itself, which knows what a checkpoint takes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

MIB = 1 << 20
LEAST = {"temporary": 256 * MIB, "memory": 64 * MIB}
"""Bytes without which nothing can run: compiled kernels and logs; what Docker gives /dev/shm by
default. What NCCL needs of that is shown by its all-reduce."""


def look(root: Path, environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """Say which places are nearly full. Raises OSError for a folder that is not there."""
    places = {
        "temporary": Path(environment.get("TMPDIR") or "/tmp"),
        "memory": root / "dev/shm",
    }
    told, faults = [], []
    for what, place in places.items():
        free = shutil.disk_usage(place).free
        told.append(f"{place} {_size(free)}")
        if free < LEAST[what]:
            faults.append(f"{place} has {_size(free)} free, less than {_size(LEAST[what])}")
        elif not os.access(place, os.W_OK):
            faults.append(f"{place} cannot be written to")
    return ", ".join(told), faults


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / MIB:.0f} MiB"
