"""Files that appear whole or not at all, copies and digests."""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqshforge.errors import WorkError
from sqshforge.host.syscalls import allocate
from sqshforge.project import owner

FICLONE = 0x40049409  # ioctl_ficlonerange(2)
COPY_PART = 32 << 20  # bytes that go one way
COPY_PIECE = 4 << 20  # bytes of one direct read and write
THREADS = 3  # one reads while another writes
PAGE = 4096  # bytes: what a direct read or write begins at and is a multiple of

CopyMethod = Callable[[int, int], None]  # copies what lies between two places

OBJECT = 16 << 20  # bytes of a file of JSON that we read
NESTING = 50  # values within each other in it

PIECE = 16 << 20  # bytes
PART = 1 << 20  # bytes that are read at once


def partial(place: Path, suffix: str = "") -> Path:
    """The name of a file, or of a folder, that is being made for a place."""
    return place.with_name(f".{place.name}.{os.getpid()}.tmp{suffix}")


def remove_leftovers(place: Path, *beside: str) -> None:
    """Remove what killed processes left for a place; only its lock's holder may call this.

    `beside` are the endings of the names of what is made together with it. What another user left
    stays where this one may not remove it. Raises `WorkError` where it has a name that this very
    process needs.
    """
    endings = "|".join(map(re.escape, ("", *beside)))
    ours = re.compile(rf"\.{re.escape(place.name)}({endings})\.(\d+)\.tmp(\.work)?")
    for path in list(place.parent.iterdir()):
        match = ours.fullmatch(path.name)
        if match is None:
            continue
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except PermissionError:
            if match[2] == str(os.getpid()):
                raise foreign("a partial file", path) from None


def foreign(what: str, path: Path) -> WorkError:
    """The error for another user's file that is in the way."""
    return WorkError(
        f"{what} of another user ({owner(path)}) is in the way",
        where=str(path),
        fix=f"once nobody works on it, as that user: rm -r {shlex.quote(str(path))}",
    )


def publish(content: bytes, place: Path) -> None:
    """Write a small file that everybody may read, safely on the disk before it has its name.

    Where that fails, on a full disk say, nothing of it stays.
    """
    with _partial(place) as written:
        written.write_bytes(content)
        written.chmod(0o644)
        sync(written)
        written.rename(place)


def read_object(path: Path) -> dict[str, Any] | None:
    """The object of JSON in a small file; None where there is none, whatever else there is."""
    try:
        # Another kind of file may have no end, or no beginning: a FIFO waits for its writer.
        if not path.is_file() or path.stat().st_size > OBJECT:
            return None
        return parse_object(path.read_bytes())
    except OSError:
        return None


def parse_object(data: bytes | str) -> dict[str, Any] | None:
    """The object that a text of JSON is; None for another, and for one that is nested deep."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    level: list[Any] = [found]
    for _ in range(NESTING):
        lists = (one.values() if isinstance(one, dict) else one for one in level)
        level = [below for one in lists for below in one if isinstance(below, (dict, list))]
        if not level:
            return found
    return None


def sync(path: Path) -> None:
    """See a file, or the names in a folder, safely on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where that cannot be; the name is taken at once."""
    with _partial(target) as written:
        written.unlink(missing_ok=True)
        try:
            os.link(source, written)
        except OSError:  # another file system, or one without links
            copy(source, written, source.stat().st_size)
            shutil.copystat(source, written)
        written.rename(target)


@contextmanager
def _partial(place: Path) -> Iterator[Path]:
    """The name of a file that is being made for a place, and is gone after the block."""
    written = partial(place)
    try:
        yield written
    finally:
        written.unlink(missing_ok=True)


def copy(source: Path, target: Path, count: int) -> None:
    """Copy the first bytes of a file to a new file, which may get more of it.

    Blocks are shared where the file system can. Else: through the page cache a copy takes a fresh
    page each 4 KiB. Where memory is at hand, or the disk is slow, nothing is faster; where a
    virtual machine gets its memory from the host as it is touched, a fast disk is several times
    faster without. Nobody tells which it is, and it may change on the way, so each part goes the
    way that was the faster one when it was last taken.
    """
    with source.open("rb") as come, target.open("xb") as go:
        try:
            fcntl.ioctl(go.fileno(), FICLONE, come.fileno())
        except OSError:
            count = min(count, os.fstat(come.fileno()).st_size)
            with suppress(OSError):  # then each write has to find its own room
                allocate(go.fileno(), count)
            with ExitStack() as held:
                ways: list[CopyMethod] = [_Cached(come.fileno(), go.fileno())]
                with suppress(OSError):  # not every file system has it
                    ways.insert(0, held.enter_context(_directly(source, target)))
                _copy_faster(ways, count)


def _copy_faster(ways: list[CopyMethod], count: int) -> None:
    """Copy in parts, each the way that took less time for its last part; the last way takes all."""
    took = dict.fromkeys(ways, 0.0)  # seconds for a byte
    for start in range(0, count, COPY_PART):
        end = min(start + COPY_PART, count)
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
                raise OSError("the file shrank while it was being read")
            start += copied


@contextmanager
def _directly(source: Path, target: Path) -> Iterator[CopyMethod]:
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
        places = range(start, end, COPY_PIECE)
        for _ in self.pool.map(lambda place: self._piece(place, end), places):
            pass

    def _piece(self, start: int, end: int) -> None:
        if not hasattr(self.buffers, "own"):
            # It begins with a page, as direct reads must.
            self.buffers.own = mmap.mmap(-1, COPY_PIECE)
        piece = memoryview(self.buffers.own)[: min(COPY_PIECE, end - start)]
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
            raise OSError("the file shrank while it was being read")
        return reached


def piece_digests_at(
    path: Path, indices: Iterable[int], jobs: int, advance: Callable[[float], None] = lambda _: None
) -> dict[int, str]:
    """The SHA-256 of these pieces of a file, by their indices."""
    found = {}
    with path.open("rb") as file, ThreadPoolExecutor(jobs) as threads:
        descriptor = file.fileno()

        def hashed(index: int) -> tuple[int, str, int]:
            return index, *_piece(descriptor, index)

        for index, one, size in threads.map(hashed, indices):
            found[index] = one
            advance(size)
    return found


def _piece(descriptor: int, index: int) -> tuple[str, int]:
    """The SHA-256 and the size of a piece.

    It is read in parts: memory for all of it takes as long as the hash.
    """
    found, part = hashlib.sha256(), memoryview(bytearray(PART))
    place, end = index * PIECE, (index + 1) * PIECE
    while place < end and (count := os.preadv(descriptor, [part[: end - place]], place)):
        found.update(part[:count])
        place += count
    return found.hexdigest(), place - index * PIECE


def piece_digests(
    path: Path,
    jobs: int,
    known: Mapping[int, str] | None = None,
    advance: Callable[[float], None] = lambda _: None,
) -> list[str]:
    """The SHA-256 of each piece of a file; those that are `known`, by index, are not read."""
    count = -(-path.stat().st_size // PIECE)
    known = known or {}
    asked = (one for one in range(count) if one not in known)
    found = {**known, **piece_digests_at(path, asked, jobs, advance)}
    return [found[index] for index in range(count)]


def digest_of_pieces(found: Sequence[str]) -> str:
    """The digest of a file by those of its pieces: `sha256-16MiB:` and 64 digits."""
    return "sha256-16MiB:" + hashlib.sha256("\n".join(found).encode()).hexdigest()


def sha256(path: Path) -> str:
    """The SHA-256 of a file, as `sha256sum` gives it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def digest(path: Path, jobs: int, advance: Callable[[float], None] = lambda _: None) -> str:
    """The digest of a file, read now; `advance` is called with the bytes as they are read.

    The pieces are hashed side by side, and after a change at a file's end only that end is read
    again; a plain SHA-256 of a file of 20 GB would take longer than all else that an edit takes.
    """
    return digest_of_pieces(piece_digests(path, jobs, advance=advance))
