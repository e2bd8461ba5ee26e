"""A command's use of the machine while it runs: memory, and disk beyond its intended output."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

EVERY = 0.02  # seconds between two samples


@dataclass
class Peak:
    """The maxima that were seen, in bytes.

    Memory is the sum over a process and all below it of what is resident; shared memory counts for
    each.
    """

    memory: int = 0
    disk: int = 0


@contextmanager
def watched(pid: int, disk: Callable[[], int]) -> Iterator[Peak]:
    """Sample a process, and the result of `disk`, for the length of a block."""
    peak, ended = Peak(), threading.Event()

    def look() -> None:
        while not ended.wait(EVERY):
            peak.memory = max(peak.memory, resident(pid))
            peak.disk = max(peak.disk, disk())

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()


def resident(pid: int) -> int:
    """Return the resident memory of a process and of all below it."""
    with contextlib.suppress(OSError, IndexError):  # it may end at any moment
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        below = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
        return pages * os.sysconf("SC_PAGESIZE") + sum(map(resident, below))
    return 0


def size(folder: Path, without: Path | None = None) -> int:
    """Return a folder's size on its disk, without what is mounted in it."""
    total = 0
    with contextlib.suppress(OSError):
        device = folder.lstat().st_dev
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                found = path.lstat()
                if path == without or found.st_dev != device:
                    continue
                total += found.st_blocks * 512
                if path.is_dir() and not path.is_symlink():
                    total += size(path)
    return total
