"""Copy a large file: blocks are shared where the file system can, else it is copied.

Through the page cache a copy takes a fresh page each 4 KiB. Where a virtual machine gets its
memory from the host as it is touched that takes several times as long as a fast disk does without,
elsewhere it is as fast, and it drives out what others have read. A slow disk is better written
behind our back: how fast it is, the start of the copy tells.
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

from sqshforge.syscalls import allocate

FICLONE = 0x40049409  # ioctl_ficlonerange(2)
TRIAL = 64 << 20  # bytes that tell how fast the disk is
FAST = 400e6  # bytes a second
PIECE = 4 << 20  # bytes of one direct read and write, at multiples of it
THREADS = 3  # one reads while another writes
PAGE = 4096  # bytes: what a direct read or write is a multiple of


def copy(source: Path, target: Path, count: int) -> None:
    """Copy the first bytes of a file to a new file, which may get more of it."""
    with source.open("rb") as come, target.open("xb") as go:
        try:
            fcntl.ioctl(go.fileno(), FICLONE, come.fileno())
        except OSError:
            count = min(count, os.fstat(come.fileno()).st_size)
            done = 0
            with contextlib.suppress(OSError):  # not every file system takes direct writes
                done = _copy_on_fast_disk(source, target, count - count % PAGE)
            _copy_cached(source, target, done, count)


def _copy_on_fast_disk(source: Path, target: Path, count: int) -> int:
    """Copy directly as long as that is fast; how much was copied."""
    started = time.monotonic()
    trial = min(count, TRIAL)
    _copy_directly(source, target, 0, trial)
    if trial < FAST * (time.monotonic() - started):
        return trial
    _copy_directly(source, target, trial, count)
    return count


def _copy_cached(source: Path, target: Path, start: int, end: int) -> None:
    with _open(source, os.O_RDONLY) as come, _open(target, os.O_WRONLY) as go:
        os.lseek(go, start, os.SEEK_SET)
        while start < end:
            copied = os.sendfile(go, come, start, end - start)
            if not copied:
                raise OSError(f"{source}: the file became shorter")
            start += copied


def _copy_directly(source: Path, target: Path, start: int, end: int) -> None:
    """Copy without the page cache, apart from what of the source is there. Both are whole pages."""
    with (
        _open(source, os.O_RDONLY) as cached,
        _open(source, os.O_RDONLY | os.O_DIRECT) as come,
        _open(target, os.O_WRONLY | os.O_DIRECT) as go,
    ):
        with contextlib.suppress(OSError):  # then each write has to find its own room
            allocate(go, end)
        copier = _Copier(cached, come, go)
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(lambda one: copier.piece(one, end), range(start, end, PIECE)):
                pass


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

    def piece(self, start: int, end: int) -> None:
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
