"""Write a tar as mksquashfs reads it: POSIX format, and GNU's for what does not fit into that.

Extended attributes, if wanted, are written as records of extended headers. A long name is split
over two fields if possible: an extra entry in front, as in GNU tar, takes both sides half as long
again.
"""

from __future__ import annotations

import struct
import zlib
from functools import lru_cache
from typing import IO

from sqshforge.tar.reader import (
    BLOCK,
    EXTENDED,
    FILE,
    FOLDER,
    LONG_LINK,
    LONG_NAME,
    PIECE,
    XATTR,
    ZEROS,
    Entry,
)

_NAME, _PREFIX = 100, 155  # most bytes of each field
_UP_TO_SUM = b"%b%07o\x000000000\x000000000\0%b%011o\0"  # the owner is root
_FROM_KIND = struct.Struct(f"c{_NAME}s8s64x8s8s{_PREFIX}s12x")
_MAGIC = b"ustar\00000"
_BLANKS = 8 * ord(" ")  # the checksum counts its own field as blanks
_SIZES = 8**11  # sizes from here on do not fit into octal digits
_LATEST = 2**32 - 1  # the latest time that a squash file can hold, in seconds of the epoch
OVERLAY = b"trusted.overlay."  # would take effect in an overlay of the mounted squash file
NAMESPACES = (b"user.", b"security.", b"trusted.")  # the ones that a squash file can hold


class Output:
    """Writes entries to a stream, which may be a pipe, in large pieces."""

    def __init__(self, out: IO[bytes], *, xattrs: bool) -> None:
        self._out = out
        self._xattrs = xattrs
        self._pending: list[bytes] = []
        self._size = 0

    def header(self, entry: Entry, name: bytes) -> None:
        """Write an entry's headers, with owner and mode changed as enroot changes them."""
        kind, mode, target = entry.kind, entry.mode, entry.target
        if kind == FOLDER:
            name += b"/"
            mode |= 0o700
        elif kind == FILE:
            mode |= 0o400
        records = self._records(entry) if self._xattrs and entry.xattrs else []
        if records:
            records += [(b"path", name)] if len(name) > _NAME else []
            records += [(b"linkpath", target)] if len(target) > _NAME else []
            text = b"".join(_record(key, value) for key, value in records)
            self._extended(EXTENDED, b"././@PaxHeader", text)
        else:
            if len(target) > _NAME:
                self._extended(LONG_LINK, b"././@LongLink", target + b"\0")
        prefix, name = (b"", name) if records else self._split(name)
        mtime = min(entry.mtime, _LATEST)
        self.data(_header(name, kind, mode, entry.size, mtime, target, entry.device, prefix))

    def small(self, name: bytes, mode: int, mtime: int, data: bytes) -> None:
        """Write a whole file: the same as `header`, `data` and `fill`, but faster."""
        size = len(data)
        prefix, name = self._split(name)
        header = _header(name, FILE, mode | 0o400, size, min(mtime, _LATEST), b"", (0, 0), prefix)
        fill = ZEROS[: -size % BLOCK]
        self._pending += (header, data, fill)
        self._size += BLOCK + size + len(fill)
        if self._size >= PIECE:
            self.flush()

    def data(self, data: bytes) -> None:
        self._pending.append(data)
        self._size += len(data)
        if self._size >= PIECE:
            self.flush()

    def fill(self, size: int) -> None:
        """Pad the last block of data of this size."""
        if size % BLOCK:
            self.data(ZEROS[: -size % BLOCK])

    def end(self) -> None:
        self.data(ZEROS[: 2 * BLOCK])
        self.flush()

    def flush(self) -> None:
        rest = memoryview(b"".join(self._pending))
        self._pending.clear()
        self._size = 0
        while rest:  # a raw file may write only a part
            rest = rest[self._out.write(rest) :]

    def _split(self, name: bytes) -> tuple[bytes, bytes]:
        """Split a name into prefix and name; write an entry in front of one that does not fit."""
        if len(name) <= _NAME:
            return b"", name
        cut = name.find(b"/", -_NAME - 1, -1)
        if 0 < cut <= _PREFIX:
            return name[:cut], name[cut + 1 :]
        self._extended(LONG_NAME, b"././@LongLink", name + b"\0")
        return b"", name

    def _extended(self, kind: bytes, name: bytes, data: bytes) -> None:
        self.data(_alike(name, kind, len(data)) + data)
        self.fill(len(data))

    def _records(self, entry: Entry) -> list[tuple[bytes, bytes]]:
        return [
            (XATTR + key, value)
            for key, value in entry.xattrs
            if key.startswith(NAMESPACES) and not key.startswith(OVERLAY)
        ]


def made(
    name: bytes, kind: bytes, mode: int, mtime: int, size: int = 0, target: bytes = b""
) -> Entry:
    """Return an entry that we add ourselves."""
    return Entry(name, kind, mode, mtime, size, 0, target, (0, 0), (), None)


@lru_cache(maxsize=256)
def _alike(name: bytes, kind: bytes, size: int) -> bytes:
    """Return the header of a long name or of records; few differ, so they are cached."""
    return _header(name, kind, 0, size, 0, b"", (0, 0))


def _header(
    name: bytes,
    kind: bytes,
    mode: int,
    size: int,
    mtime: int,
    target: bytes,
    device: tuple[int, int],
    prefix: bytes = b"",
) -> bytes:
    length = b"%011o\0" % size if size < _SIZES else b"\x80" + size.to_bytes(11, "big")
    field = name[:_NAME].ljust(_NAME, b"\0")  # a longer one is complete in an entry in front
    begin = _UP_TO_SUM % (field, mode, length, mtime)
    end, sum_of_end = _from_kind(kind, target, device, prefix)
    return b"%b%06o\0 %b" % (begin, _sum(begin) + _BLANKS + sum_of_end, end)


@lru_cache(maxsize=256)
def _from_kind(
    kind: bytes, target: bytes, device: tuple[int, int], prefix: bytes
) -> tuple[bytes, int]:
    """Return what follows a header's checksum, and its sum; most files of a folder share it."""
    major, minor = (b"%07o\0" % number for number in device)
    end = _FROM_KIND.pack(kind, target, _MAGIC, major, minor, prefix)
    rest = len(end) - _PREFIX - 12
    return end, _sum(end[:rest]) + _sum(prefix)


def _sum(data: bytes) -> int:
    """Sum some bytes of a header, in a tenth of the time of Python's own `sum`.

    The sum is the lower half of Adler-32, which is modulo 65,521. Neither the prefix reaches that,
    nor the rest of the header before or after the checksum: a name of 100 bytes may be anything,
    but everything else is digits.
    """
    return zlib.adler32(data, 0) & 0xFFFF


def _record(key: bytes, value: bytes) -> bytes:
    """Return a record: a line that begins with its own length."""
    rest = b" %s=%s\n" % (key, value)
    length = len(rest) + 1
    while len(line := b"%d%s" % (length, rest)) != length:
        length = len(line)
    return line
