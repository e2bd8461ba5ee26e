"""Read bytes of a squash file by place, and its tables, which are sequences of packed blocks."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from sqshforge.squashfs.codec import Unpack
from sqshforge.squashfs.faults import BrokenError

METADATA = 8192  # unpacked bytes of a table's block; only the last may have fewer
PLAIN = 0x8000  # bit of such a block's length: the block is not compressed
# Limits on a table's unpacked bytes: MOST in any case, and RATIO times its stored bytes, or SMALL
# if that is more.
MOST, SMALL, RATIO = 1 << 30, 64 << 20, 64


@dataclass(frozen=True)
class Reader:
    """An open squash file, and the function that unpacks its blocks."""

    file: IO[bytes]
    size: int
    unpack: Unpack

    def at(self, place: int, size: int) -> bytes:
        """Return bytes of the file as they are stored."""
        if place + size > self.size:
            raise BrokenError("it ends before the length it declares")
        data = os.pread(self.file.fileno(), size, place)
        if len(data) != size:
            raise BrokenError("it was cut short while it was read")
        return data

    def block(self, place: int, size: int, most: int, *, plain: bool) -> bytes:
        """Return a block's content; `BrokenError` if it has more than `most` bytes."""
        data = self.at(place, size)
        if not plain:
            try:
                data = self.unpack(data, most)
            except Exception as error:  # each library has its own exceptions
                raise BrokenError(f"a block cannot be unpacked: {error}") from None
        if len(data) > most:
            raise BrokenError("a block is larger than it may be")
        return data

    def metadata(self, place: int) -> tuple[bytes, int]:
        """Return the content of a table's block, and the place of the next block."""
        (length,) = struct.unpack("<H", self.at(place, 2))
        size = length & ~PLAIN
        if not 0 < size <= METADATA:
            raise BrokenError("a table has a block that is too large, or empty")
        found = self.block(place + 2, size, METADATA, plain=bool(length & PLAIN))
        return found, place + 2 + size

    def indexed(self, place: int, count: int, size: int) -> Iterator[bytes]:
        """Yield a table's `count` entries of `size` bytes; the list of its blocks is at `place`."""
        left = count * size
        blocks = -(-left // METADATA)
        for (start,) in struct.iter_unpack("<Q", self.at(place, 8 * blocks)):
            data, _ = self.metadata(start)
            if len(data) != min(left, METADATA):
                raise BrokenError("a table is too short")
            left -= len(data)
            yield from (data[at : at + size] for at in range(0, len(data), size))


@dataclass(frozen=True)
class Table:
    """Consecutive blocks, unpacked."""

    data: bytes
    starts: dict[int, int]  # by block: from its place in the table to its place in `data`

    @classmethod
    def of(cls, reader: Reader, start: int, end: int) -> Table:
        """Read the table between two places."""
        pieces, starts, size, place = [], dict[int, int](), 0, start
        most = min(MOST, max(SMALL, RATIO * (end - start)))
        while place < end:
            if size % METADATA or size > most:
                raise BrokenError("a table is larger than it may be, or has a gap")
            starts[place - start] = size
            data, place = reader.metadata(place)
            pieces.append(data)
            size += len(data)
        if place != end:
            raise BrokenError("two tables overlap")
        return cls(b"".join(pieces), starts)

    def place(self, block: int, offset: int) -> int:
        """Return a place in `data` for an offset in the block at a place of the table."""
        if block not in self.starts or offset > METADATA:
            raise BrokenError("it refers to an invalid table offset")
        return self.starts[block] + offset

    def cut(self, place: int, size: int) -> bytes:
        """Return `size` bytes of the data; `BrokenError` if it ends before."""
        if place + size > len(self.data):
            raise BrokenError("a table ends before the length it declares")
        return self.data[place : place + size]
