"""The extended attributes of a squash file."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from sqshforge.squashfs.faults import BrokenError
from sqshforge.squashfs.superblock import NOWHERE
from sqshforge.squashfs.tables import Reader, Table

START = struct.Struct("<Q2I")  # the place of all names and values, how many sets there are
SET = struct.Struct("<Q2I")  # the place of a set's first name, how many it has, their bytes
NAME = struct.Struct("<2H")  # the prefix, the length of what follows it
PREFIXES = (b"user.", b"trusted.", b"security.")
ELSEWHERE = 0x100  # of the prefix: the value is the place of the value


@dataclass(frozen=True)
class Attributes:
    """Sets of names and values, which inodes name by number."""

    table: Table
    sets: list[bytes]

    @classmethod
    def read(cls, reader: Reader, place: int) -> Attributes:
        """Read the table at a place of the file."""
        if place == NOWHERE:
            raise BrokenError("it has extended attributes, and no table of them")
        start, count, _ = START.unpack(reader.at(place, START.size))
        sets = list(reader.indexed(place + START.size, count, SET.size))
        (end,) = struct.unpack("<Q", reader.at(place + START.size, 8))
        return cls(Table.of(reader, start, end), sets)

    def of(self, number: int) -> dict[bytes, bytes]:
        """The names and values of a set."""
        if number >= len(self.sets):
            raise BrokenError("a file has extended attributes that are not in it")
        first, count, _ = SET.unpack(self.sets[number])
        place = self.table.place(first >> 16, first & 0xFFFF)
        found = {}
        for _ in range(count):
            kind, length = NAME.unpack(self.table.cut(place, NAME.size))
            place += NAME.size
            if kind & 0xFF >= len(PREFIXES):
                raise BrokenError("an extended attribute is of a kind that is none")
            name = PREFIXES[kind & 0xFF] + self.table.cut(place, length)
            place += length
            value, place = self._value(place)
            if kind & ELSEWHERE:
                if len(value) != 8:
                    raise BrokenError("an extended attribute names a place that is none")
                (where,) = struct.unpack("<Q", value)
                value, _ = self._value(self.table.place(where >> 16, where & 0xFFFF))
            found[name] = value
        return found

    def _value(self, place: int) -> tuple[bytes, int]:
        (length,) = struct.unpack("<I", self.table.cut(place, 4))
        return self.table.cut(place + 4, length), place + 4 + length
