"""Copy a large file: blocks are shared where the file system can, else it is copied.

Through the page cache a copy takes a fresh page each 4 KiB. Where memory is at hand, or the disk
is slow, nothing is faster; where a virtual machine gets its memory from the host as it is touched,
a fast disk is several times faster without. Nobody tells which it is, and it may change on the
way, so each part goes the way that was the faster one when it was last taken.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from sqshforge.host.syscalls import allocate

FICLONE = 0x40049409  # ioctl_ficlonerange(2)
PART = 32 << 20  # bytes that go one way
PIECE = 4 << 20  # bytes of one direct read and write
THREADS = 3  # one reads while another writes
PAGE = 4096  # bytes: what a direct read or write begins at and is a multiple of

Way = Callable[[int, int], None]  # copies what lies between two places


def copy(source: Path, target: Path, count: int) -> None:
    """Copy the first bytes of a file to a new file, which may get more of it."""
    with source.open("rb") as come, target.open("xb") as go:
        try:
            fcntl.ioctl(go.fileno(), FICLONE, come.fileno())
        except OSError:
            count = min(count, os.fstat(come.fileno()).st_size)
            with suppress(OSError):  # then each write has to find its own room
                allocate(go.fileno(), count)
            with ExitStack() as held:
                ways: list[Way] = [_Cached(come.fileno(), go.fileno())]
                with suppress(OSError):  # not every file system has it
                    ways.insert(0, held.enter_context(_directly(source, target)))
                _copy_faster(ways, count)


def _copy_faster(ways: list[Way], count: int) -> None:
    """Copy in parts, each the way that took less time for its last part; the last way takes all."""
    took = dict.fromkeys(ways, 0.0)  # seconds for a byte
    for start in range(0, count, PART):
        end = min(start + PART, count)
        way = min(took, key=took.__getitem__) if end % PAGE == 0 else ways[-1]
        started = time.monotonic()
        try:
            way(start, end)
        except OSError:
            if way is ways[-1]:
                raise
            del took[way]
            ways[-1](start, end)
        else:
            took[way] = (time.monotonic() - started) / (end - start)


@dataclass(frozen=True)
class _Cached:
    """Copies through the page cache. Both are descriptors."""

    come: int
    go: int

    def __call__(self, start: int, end: int) -> None:
        os.lseek(self.go, start, os.SEEK_SET)
        while start < end:
            copied = os.sendfile(self.go, self.come, start, end - start)
            if not copied:
                raise OSError("the file became shorter")
            start += copied


@contextmanager
def _directly(source: Path, target: Path) -> Iterator[Way]:
    with (
        _open(source, os.O_RDONLY) as cached,
        _open(source, os.O_RDONLY | os.O_DIRECT) as come,
        _open(target, os.O_WRONLY | os.O_DIRECT) as go,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        yield _Direct(cached, come, go, pool)


@contextmanager
def _open(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _Direct:
    """Copies pieces side by side, without the page cache, but for what of the source is there.

    The first three are descriptors; `cached` reads through the page cache.
    """

    cached: int
    come: int
    go: int
    pool: Executor
    buffers: threading.local = field(default_factory=threading.local)

    def __call__(self, start: int, end: int) -> None:
        for _ in self.pool.map(lambda place: self._piece(place, end), range(start, end, PIECE)):
            pass

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
