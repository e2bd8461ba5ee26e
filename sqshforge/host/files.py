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
COPY_PART = 32 << 20  # bytes copied by one method before the next is chosen
COPY_PIECE = 4 << 20  # bytes of one direct read and write
THREADS = 3  # one reads while another writes
PAGE = 4096  # bytes: the alignment of a direct read or write

CopyMethod = Callable[[int, int], None]  # copies the bytes between two offsets

OBJECT = 16 << 20  # bytes: the largest JSON file that is read
NESTING = 50  # levels: the deepest JSON that is accepted

PIECE = 16 << 20  # bytes
PART = 1 << 20  # bytes read at once


def partial(place: Path, suffix: str = "") -> Path:
    """The temporary name of a file or folder while it is made for `place`."""
    return place.with_name(f".{place.name}.{os.getpid()}.tmp{suffix}")


def remove_leftovers(place: Path, *beside: str) -> None:
    """Remove partial files that killed processes left; only the lock's holder may call this.

    `beside` are the suffixes of files that are made together with `place`. Another user's leftovers
    stay if this one may not remove them. Raises `WorkError` if one of those has a name that this
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
    """Write a small file that all users may read; it is synced to the disk before it gets its name.

    If that fails, on a full disk for example, nothing of it stays, and the error names the place.
    """
    with _partial(place) as written:
        try:
            written.write_bytes(content)
            written.chmod(0o644)
            sync(written)
            written.rename(place)
        except OSError as error:
            if error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, str(place)) from None


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a small file; None if the file is missing or holds anything else."""
    try:
        # Reading another kind of file may never end, or never begin: a FIFO waits for a writer.
        if not path.is_file() or path.stat().st_size > OBJECT:
            return None
        return parse_object(path.read_bytes())
    except OSError:
        return None


def parse_object(data: bytes | str) -> dict[str, Any] | None:
    """Parse a JSON object; return None for any other text and for deeply nested objects."""
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
    """Sync a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link(source: Path, target: Path) -> None:
    """Make a hard link, or a copy if that is impossible; the new name appears atomically."""
    with _partial(target) as written:
        written.unlink(missing_ok=True)
        try:
            os.link(source, written)
        except OSError:  # on another file system, or one without links
            copy(source, written, source.stat().st_size)
            shutil.copystat(source, written)
        written.rename(target)


@contextmanager
def _partial(place: Path) -> Iterator[Path]:
    """Yield the temporary name of a file for `place`; remove it after the block."""
    written = partial(place)
    try:
        yield written
    finally:
        written.unlink(missing_ok=True)


def copy(source: Path, target: Path, count: int) -> None:
    """Copy the first `count` bytes of a file to a new file, which may get more than those.

    Blocks are shared if the file system can do that, and then those of the whole file. Otherwise
    the bytes go through the page cache, which takes a new page for every 4 KiB, or past it. With
    free memory or a slow disk, the page cache is fastest; on a virtual machine that gets memory
    from its host on first touch, direct I/O on a fast disk is several times faster. Which case
    holds cannot be known and may change during the copy, so each part takes the way that was faster
    when it was last used.
    """
    with source.open("rb") as come, target.open("xb") as go:
        try:
            fcntl.ioctl(go.fileno(), FICLONE, come.fileno())
        except OSError:
            count = min(count, os.fstat(come.fileno()).st_size)
            with suppress(OSError):  # without it, each write allocates its own blocks
                allocate(go.fileno(), count)
            with ExitStack() as held:
                ways: list[CopyMethod] = [_Cached(come.fileno(), go.fileno())]
                with suppress(OSError):  # not every file system has direct I/O
                    ways.insert(0, held.enter_context(_directly(source, target)))
                _copy_faster(ways, count)


def _copy_faster(ways: list[CopyMethod], count: int) -> None:
    """Copy in parts, each the way that was faster for its last part; `ways[-1]` can copy any."""
    took = dict.fromkeys(ways, 0.0)  # seconds per byte
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
    """Copies through the page cache, from the descriptor `come` to `go`."""

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
    """Copies pieces in parallel, past the page cache; source pages already in it are used.

    The first three fields are descriptors; `cached` reads through the page cache.
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
            # A mapping is page-aligned, as direct reads require.
            self.buffers.own = mmap.mmap(-1, COPY_PIECE)
        piece = memoryview(self.buffers.own)[: min(COPY_PIECE, end - start)]
        done = 0
        while done < len(piece):
            done = self._read(piece, done, start)
        done = 0
        while done < len(piece):
            done += os.pwrite(self.go, piece[done:], start + done)

    def _read(self, piece: memoryview, done: int, start: int) -> int:
        """Read on from `done`, from the page cache if possible, else from the disk."""
        try:
            reached = done + os.preadv(self.cached, [piece[done:]], start + done, os.RWF_NOWAIT)
        except OSError:  # it is not in the cache, or RWF_NOWAIT is not supported
            whole = done - done % PAGE
            reached = whole + os.preadv(self.come, [piece[whole:]], start + whole)
        if reached <= done:
            raise OSError("the file shrank while it was being read")
        return reached


def piece_digests_at(
    path: Path, indices: Iterable[int], jobs: int, advance: Callable[[float], None] = lambda _: None
) -> dict[int, str]:
    """The SHA-256 of the pieces of a file at these indices, by index."""
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

    It is read in parts: allocating memory for a whole piece takes as long as hashing it.
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
    """The SHA-256 of each piece of a file; pieces in `known`, by index, are not read."""
    count = -(-path.stat().st_size // PIECE)
    known = known or {}
    asked = (one for one in range(count) if one not in known)
    found = {**known, **piece_digests_at(path, asked, jobs, advance)}
    return [found[index] for index in range(count)]


def digest_of_pieces(found: Sequence[str]) -> str:
    """The digest of a file from the digests of its pieces: `sha256-16MiB:` and 64 digits."""
    return "sha256-16MiB:" + hashlib.sha256("\n".join(found).encode()).hexdigest()


def sha256(path: Path) -> str:
    """The SHA-256 of a file, as `sha256sum` gives it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def digest(path: Path, jobs: int, advance: Callable[[float], None] = lambda _: None) -> str:
    """The digest of a file, which is read now; `advance` is called with counts of bytes read.

    The pieces are hashed in parallel, and after a change at a file's end only that end is read
    again. A plain SHA-256 of a file of 20 GB would take longer than the rest of an edit loop.
    """
    return digest_of_pieces(piece_digests(path, jobs, advance=advance))
