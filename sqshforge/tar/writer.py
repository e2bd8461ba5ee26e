"""A tar as mksquashfs reads it: GNU's form, and POSIX records where attributes are wanted."""

from __future__ import annotations

import struct
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

_HEADER = struct.Struct("100s8s8s8s12s12s8sc100s8s64s8s8s167s")
_ROOT, _MAGIC = b"0000000\0", b"ustar  \0"
_ALIKE = sum(2 * _ROOT + _MAGIC + b" " * 8)  # of every header; blanks for the sum itself
_SIZES = 8**11  # from here on octal digits do not do
_LATEST = 2**32 - 1  # seconds that a squash file can hold
OVERLAY = b"trusted.overlay."  # it would be obeyed when the squash file is mounted
NAMESPACES = (b"user.", b"security.", b"trusted.")  # those that a squash file can hold


class Output:
    """Writes entries to a stream, which may be a pipe, in large pieces."""

    def __init__(self, out: IO[bytes], *, xattrs: bool) -> None:
        self._out = out
        self._xattrs = xattrs
        self._pending: list[bytes] = []
        self._size = 0

    def header(self, entry: Entry, name: bytes) -> None:
        """What stands before an entry's data, its owner and modes as enroot changes them."""
        kind, mode, target = entry.kind, entry.mode, entry.target
        if kind == FOLDER:
            name += b"/"
            mode |= 0o700
        elif kind == FILE:
            mode |= 0o400
        records = self._records(entry) if self._xattrs and entry.xattrs else []
        if records:
            records += [(b"path", name)] if len(name) > 100 else []
            records += [(b"linkpath", target)] if len(target) > 100 else []
            text = b"".join(_record(key, value) for key, value in records)
            self._extended(EXTENDED, b"././@PaxHeader", text)
        else:
            if len(target) > 100:
                self._extended(LONG_LINK, b"././@LongLink", target + b"\0")
            if len(name) > 100:
                self._extended(LONG_NAME, b"././@LongLink", name + b"\0")
        mtime = min(entry.mtime, _LATEST)
        self.data(_header(name, kind, mode, entry.size, mtime, target, entry.device))

    def small(self, name: bytes, mode: int, mtime: int, data: bytes) -> None:
        """A whole file: the same as its header, its data and what fills that up, in less time."""
        size = len(data)
        if len(name) > 100:
            self._extended(LONG_NAME, b"././@LongLink", name + b"\0")
        header = _header(name, FILE, mode | 0o400, size, min(mtime, _LATEST), b"", (0, 0))
        self.data(b"".join((header, data, ZEROS[: -size % BLOCK])))

    def data(self, data: bytes) -> None:
        self._pending.append(data)
        self._size += len(data)
        if self._size >= PIECE:
            self.flush()

    def fill(self, size: int) -> None:
        """Fill the last block of so much data up."""
        if size % BLOCK:
            self.data(ZEROS[: -size % BLOCK])

    def end(self) -> None:
        self.data(ZEROS[: 2 * BLOCK])
        self.flush()

    def flush(self) -> None:
        rest = memoryview(b"".join(self._pending))
        self._pending.clear()
        self._size = 0
        while rest:  # a raw file takes what it can
            rest = rest[self._out.write(rest) :]

    def _extended(self, kind: bytes, name: bytes, data: bytes) -> None:
        self.data(_header(name, kind, 0, len(data), 0, b"", (0, 0)) + data)
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
    """An entry of our own."""
    return Entry(name, kind, mode, mtime, size, 0, target, (0, 0), (), None)


def _header(
    name: bytes,
    kind: bytes,
    mode: int,
    size: int,
    mtime: int,
    target: bytes,
    device: tuple[int, int],
) -> bytes:
    numbers = b"%07o\0" % mode, b"%011o\0" % mtime, b"%07o\0" % device[0], b"%07o\0" % device[1]
    length = b"%011o\0" % size if size < _SIZES else b"\x80" + size.to_bytes(11, "big")
    name, target = name[:100], target[:100]
    total = _ALIKE + sum(b"".join((name, *numbers, length, kind, target)))
    return _HEADER.pack(
        *(name, numbers[0], _ROOT, _ROOT, length, numbers[1], b"%06o\0 " % total, kind, target),
        *(_MAGIC, b"", numbers[2], numbers[3], b""),
    )


def _record(key: bytes, value: bytes) -> bytes:
    """A line with its own length in front."""
    rest = b" %s=%s\n" % (key, value)
    length = len(rest) + 1
    while len(line := b"%d%s" % (length, rest)) != length:
        length = len(line)
    return line
