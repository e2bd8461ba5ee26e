"""The bytes of a squash file by their places, and its tables of small packed blocks."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from sqshforge.squashfs.codec import Unpack
from sqshforge.squashfs.faults import BrokenError

METADATA = 8192  # bytes that a block of a table has, unpacked; only the last has fewer
PLAIN = 0x8000  # of such a block's length: it is not packed
# Bytes that a table may have, unpacked: any, and one with so many bytes for each of the file's.
MOST, SMALL, RATIO = 1 << 30, 64 << 20, 64


@dataclass(frozen=True)
class Reader:
    """A squash file that is open, and how its blocks are unpacked."""

    file: IO[bytes]
    size: int
    unpack: Unpack

    def at(self, place: int, size: int) -> bytes:
        """Bytes of the file as they are."""
        if place + size > self.size:
            raise BrokenError("it ends before the length it declares")
        data = os.pread(self.file.fileno(), size, place)
        if len(data) != size:
            raise BrokenError("it was cut short while it was read")
        return data

    def block(self, place: int, size: int, most: int, *, plain: bool) -> bytes:
        """A block's content, of at most `most` bytes."""
        data = self.at(place, size)
        if not plain:
            try:
                data = self.unpack(data, most)
            except Exception as error:  # each library has its own
                raise BrokenError(f"a block cannot be unpacked: {error}") from None
        if len(data) > most:
            raise BrokenError("a block is larger than it may be")
        return data

    def metadata(self, place: int) -> tuple[bytes, int]:
        """A block of a table, and the place of the next one."""
        (length,) = struct.unpack("<H", self.at(place, 2))
        size = length & ~PLAIN
        if not 0 < size <= METADATA:
            raise BrokenError("a table has a block that is too large, or empty")
        found = self.block(place + 2, size, METADATA, plain=bool(length & PLAIN))
        return found, place + 2 + size

    def indexed(self, place: int, count: int, size: int) -> Iterator[bytes]:
        """The entries of a table whose blocks are found by a list at a place; each has `size`."""
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
    """Blocks that follow one another, unpacked."""

    data: bytes
    starts: dict[int, int]  # of each block: from its place in the table to that in `data`

    @classmethod
    def of(cls, reader: Reader, start: int, end: int) -> Table:
        """The table between two places."""
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
        """Where something is in `data`, by its block's place and the place in that."""
        if block not in self.starts or offset > METADATA:
            raise BrokenError("it refers to an invalid table offset")
        return self.starts[block] + offset

    def cut(self, place: int, size: int) -> bytes:
        """Some bytes of it."""
        if place + size > len(self.data):
            raise BrokenError("a table ends before the length it declares")
        return self.data[place : place + size]
