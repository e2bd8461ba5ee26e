"""Files that appear whole or not at all, and what is left of those that did not."""

from __future__ import annotations

import glob
import os
import shutil
from pathlib import Path

from sqshforge.host.clone import copy


def partial(place: Path, suffix: str = "") -> Path:
    """The name of a file, or of a folder, that is being made for a place."""
    return place.with_name(f".{place.name}.{os.getpid()}.tmp{suffix}")


def remove_leftovers(place: Path) -> None:
    """Remove what killed processes left for a place; only its lock's holder may call this."""
    for path in place.parent.glob(f".{glob.escape(place.name)}.*.tmp*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def publish(content: bytes, place: Path) -> None:
    """Write a small file that everybody may read, safely on the disk before it has its name."""
    written = partial(place)
    written.write_bytes(content)
    written.chmod(0o644)
    sync(written)
    written.rename(place)


def sync(path: Path) -> None:
    """See a file, or the names in a folder, safely on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where that cannot be; the name is taken at once."""
    written = partial(target)
    written.unlink(missing_ok=True)
    try:
        os.link(source, written)
    except OSError:  # another file system, or one without links
        copy(source, written, source.stat().st_size)
        shutil.copystat(source, written)
    written.rename(target)
