"""Copy a large file: blocks are shared where the file system can, else it is copied directly.

Through the page cache a copy would cost a fresh page each 4 KiB, which takes longer than a fast
disk does (several times where a virtual machine gets its memory from the host as it is touched),
and would drive out what others have read. A slow disk is better written behind our back.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

FICLONE = 0x40049409  # ioctl_ficlonerange(2)
PIECE = 4 << 20  # bytes of one read and write, at multiples of it
THREADS = 3  # one reads while another writes
PAGE = 4096  # bytes: what a direct read or write is a multiple of
TRIAL = 64 << 20  # bytes that tell how fast the disk is
FAST = 400e6  # bytes a second


def copy(source: Path, target: Path, count: int) -> None:
    """Copy the first bytes of a file to a new file, which may get more of it."""
    with source.open("rb") as come, target.open("xb") as go:
        try:
            fcntl.ioctl(go.fileno(), FICLONE, come.fileno())
        except OSError:
            done = _copy_directly(source, target, count)
            come.seek(done)
            go.seek(done)
            while done < count and (
                copied := os.sendfile(go.fileno(), come.fileno(), None, count - done)
            ):
                done += copied


def _copy_directly(source: Path, target: Path, count: int) -> int:
    """Copy whole pages from the start of a file, all of them or those of a trial; their bytes.

    None where something is in the way: not every file system takes direct reads and writes.
    """
    count -= count % PAGE
    started = time.monotonic()
    try:
        with _open(source, os.O_RDONLY) as cached, _directly(source, target) as (come, go):
            copier = _Copier(cached, come, go)
            done = copier.run(0, min(count, TRIAL))
            if done < FAST * (time.monotonic() - started):
                done = copier.run(done, count)
    except OSError:
        return 0
    return done


@contextlib.contextmanager
def _directly(source: Path, target: Path) -> Iterator[tuple[int, int]]:
    with (
        _open(source, os.O_RDONLY | os.O_DIRECT) as come,
        _open(target, os.O_WRONLY | os.O_DIRECT) as go,
    ):
        yield come, go


@contextlib.contextmanager
def _open(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _Copier:
    """Copies pieces side by side. All are descriptors; `cached` reads through the page cache."""

    cached: int
    come: int
    go: int
    buffers: threading.local = field(default_factory=threading.local)

    def run(self, start: int, end: int) -> int:
        """Copy what lies between two places; the end."""
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(lambda place: self._piece(place, end), range(start, end, PIECE)):
                pass
        return end

    def _piece(self, start: int, end: int) -> None:
        if not hasattr(self.buffers, "own"):
            self.buffers.own = mmap.mmap(-1, PIECE)  # it begins with a page, as direct reads must
        piece = memoryview(self.buffers.own)[: min(PIECE, end - start)]
        done = 0
        while done < len(piece):
            done = self._read(piece, done, start)
        done = 0
        while done < len(piece):
            done += os.pwrite(self.go, piece[done:], start + done)

    def _read(self, piece: memoryview, done: int, start: int) -> int:
        """Read on from `done`: what is in the page cache from there, else from the disk."""
        try:
            reached = done + os.preadv(self.cached, [piece[done:]], start + done, os.RWF_NOWAIT)
        except OSError:  # it is not in the cache, or cannot be asked for
            whole = done - done % PAGE
            reached = whole + os.preadv(self.come, [piece[whole:]], start + whole)
        if reached <= done:
            raise OSError("the file became shorter")
        return reached
