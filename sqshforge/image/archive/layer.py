"""The bytes of a layer: read in place, decompressed, counted, and checked by their digests."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Protocol, cast

import zstandard
from isal import igzip, igzip_lib

from sqshforge.engine.types import GROWS
from sqshforge.errors import RequestError, WorkError
from sqshforge.tar import limits
from sqshforge.tar.faults import broken, refused, too_much

PIECE = 1 << 20
FAULTS: tuple[type[Exception], ...] = (
    EOFError,
    OSError,
    zlib.error,
    cast(type[Exception], igzip_lib.IsalError),  # its stub has it as an instance, not a class
    zstandard.ZstdError,
)
MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
}


class File:
    """An open regular file that can be checked for changes since it was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # O_NONBLOCK: do not wait for the writer of a FIFO.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error.strerror}") from None
        self._first = os.fstat(self._descriptor)
        if not stat.S_ISREG(self._first.st_mode):
            self.close()
            raise RequestError(f"{path} is not a regular file", fix="save it to a file first")
        self.size = self._first.st_size

    def read(self, count: int, offset: int) -> bytes:
        try:
            return os.pread(self._descriptor, count, offset)
        except OSError as error:
            raise WorkError(f"{self.path} cannot be read: {error.strerror}") from None

    def check_unchanged(self) -> None:
        """Raise `WorkError` if the file was written to since it was opened."""
        now = os.fstat(self._descriptor)
        if (now.st_size, now.st_mtime_ns) != (self._first.st_size, self._first.st_mtime_ns):
            raise WorkError(
                f"{self.path} changed while it was being read", fix="try again when it is complete"
            )

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True)
class Region:
    """`size` bytes of a file, from the offset `start` on."""

    file: File
    start: int
    size: int

    @property
    def place(self) -> tuple[Path, int]:
        """A key that is the same for the same bytes."""
        return self.file.path, self.start

    def whole(self, limit: int, what: str) -> bytes:
        """All its bytes at once; more than `limit` are refused before they are read."""
        if self.size > limit:
            raise refused(
                f"{what} has {self.size} bytes, and {limit} are the most",
                str(self.file.path),
                "see whether the address is that of an image",
            )
        return self.file.read(self.size, self.start)

    def first(self, count: int) -> bytes:
        return self.file.read(min(count, self.size), self.start)


class RegionReader(io.RawIOBase):
    """Reads a region from its start; passes all bytes to `see` as well."""

    def __init__(self, region: Region, see: Callable[[bytes], None] | None = None) -> None:
        self._region = region
        self.see = see
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        left = self._region.size - self._at
        count = left if size < 0 else min(size, left)
        data = self._region.file.read(count, self._region.start + self._at) if count else b""
        self._at += len(data)
        if self.see is not None and data:
            self.see(data)
        return data

    def skip(self, count: int) -> int:
        """Skip bytes without reading them; return how many were skipped."""
        count = min(count, self._region.size - self._at)
        self._at += count
        return count


@dataclass(frozen=True)
class Layer:
    """A layer as a manifest lists it; `digest` is that of the blob if the manifest gives one."""

    region: Region
    diff_id: str
    digest: str | None
    where: str  # for messages

    @property
    def form(self) -> str:
        """The compression, judged by the first bytes: media types are often wrong."""
        return form(self.region)

    @cached_property
    def window(self) -> int:
        """The bytes of unpacked data that its decoder has to keep: zstd's window, else 0."""
        return _largest_window(self.region) if self.form == "zstd" else 0

    @property
    def estimate(self) -> int:
        return int(self.region.size * GROWS.get(self.form, 1.0))


def form(region: Region) -> str:
    begin = region.first(8)
    if begin[1:4] == b"\x2a\x4d\x18" and begin[0] & 0xF0 == 0x50:
        return "zstd"  # it begins with a skippable frame
    return next((name for magic, name in MAGIC.items() if begin.startswith(magic)), "tar")


def _largest_window(region: Region) -> int:
    """The largest window of any zstd frame, in bytes; limits.WINDOW if that is unknown.

    A layer may have a frame for each of its files (zstd:chunked). Frames do not state their size,
    so the headers of all blocks are read (RFC 8878, section 3.1.1).
    """
    found = at = blocks = 0
    while at < region.size:
        head = region.file.read(min(18, region.size - at), region.start + at)
        if head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50:  # a skippable frame
            at += 8 + int.from_bytes(head[4:8], "little")
            continue
        try:
            frame = zstandard.get_frame_parameters(head)
            at += zstandard.frame_header_size(head)
        except zstandard.ZstdError:
            return limits.WINDOW
        found = max(found, frame.window_size)
        is_last = False
        while not is_last:
            block = int.from_bytes(region.file.read(3, region.start + at), "little")
            is_last, repeated, size = bool(block & 1), block >> 1 & 3 == 1, block >> 3
            at += 3 + (1 if repeated else size)
            blocks += 1
            if at > region.size or blocks > limits.BLOCKS:
                return limits.WINDOW
        at += 4 if frame.has_checksum else 0
    return found


@dataclass
class Meter:
    """Counts the bytes that layers unpack to, and limits them, also by their packed size."""

    packed: int
    unpacked: int = 0
    report: Callable[[float], None] | None = field(default=None)

    def count(self, amount: int, where: str) -> None:
        self.unpacked += amount
        if self.unpacked > limits.UNPACKED:
            raise too_much("the layers unpack to more than a terabyte", where)
        if self.unpacked > max(limits.RATIO_FROM, limits.RATIO * self.packed):
            raise too_much(f"the layers unpack to over {limits.RATIO} times their size", where)
        if self.report is not None:
            self.report(amount)


class Hasher:
    """A digest that is computed in the background while the caller reads on."""

    def __init__(self, digest: str, pool: ThreadPoolExecutor) -> None:
        self.expected = digest
        self._name = digest.partition(":")[0]
        self._hash = hashlib.new(self._name)
        self._pool = pool
        self._last: Future[None] | None = None

    def update(self, data: bytes) -> None:
        if self._last is not None:
            self._last.result()
        self._last = self._pool.submit(self._hash.update, data)

    def is_right(self) -> bool:
        if self._last is not None:
            self._last.result()
        return f"{self._name}:{self._hash.hexdigest()}" == self.expected


class _Decoder(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Unpacked:
    """A layer's tar, decompressed as it is read; `read` returns b"" at the end.

    `window` is the largest window in bytes that a zstd frame may ask for.
    """

    def __init__(
        self,
        layer: Layer,
        see: Callable[[bytes], None] | None = None,
        *,
        window: int = limits.WINDOW,
    ) -> None:
        self._layer = layer
        self.raw = RegionReader(layer.region, see)
        self.skip: Callable[[int], int] | None = None  # only for a plain tar without `see`
        self._decoder: _Decoder
        kind = layer.form
        self.is_plain = kind == "tar"
        if kind == "gzip":
            self._decoder = igzip.IGzipFile(fileobj=self.raw, mode="rb")
        elif kind == "zstd":
            decoder = zstandard.ZstdDecompressor(max_window_size=window)
            self._decoder = decoder.stream_reader(
                cast(IO[bytes], self.raw), read_size=PIECE // 4, read_across_frames=True
            )
        elif kind == "tar":
            self._decoder = self.raw
            self.skip = self.raw.skip if see is None else None
        else:
            raise refused(
                f"a layer is compressed with {kind}",
                layer.where,
                "write the archive with gzip, zstd or no compression",
            )

    def read(self) -> bytes:
        try:
            return self._decoder.read(PIECE)
        except FAULTS as error:
            raise broken(
                f"a layer cannot be decompressed ({str(error) or 'it ends early'})",
                self._layer.where,
            ) from None
