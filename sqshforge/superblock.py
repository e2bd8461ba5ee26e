"""The first bytes of a squash file: where its parts are (squashfs 4.0, little-endian).

The superblock comes first, then the content of all files, then the tables: who has the content,
the superblock and the tables has the file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from sqshforge.errors import WorkError

MAGIC = 0x73717368
LAYOUT = struct.Struct("<5I6H8Q")


@dataclass(frozen=True)
class Superblock:
    """What we need of it, in bytes from the start of the file."""

    used: int  # the length of the file, without what fills its last 4 KiB up
    tables: int  # the start of the tables, which is the end of all files' content


@dataclass(frozen=True)
class Tables:
    """All of a squash file but the content of its files: a megabyte or so for a large image."""

    superblock: bytes
    start: int  # of the tables, in bytes
    rest: bytes  # from there to the end

    @classmethod
    def of(cls, path: Path) -> Tables:
        """Take them from a file."""
        start = read(path).tables
        with path.open("rb") as file:
            first = file.read(LAYOUT.size)
            file.seek(start)
            return cls(first, start, file.read())

    def put(self, path: Path) -> None:
        """Make a file whose content is this one's into the file that they were taken from."""
        with path.open("r+b") as file:
            file.write(self.superblock)
            file.seek(self.start)
            file.write(self.rest)
            file.truncate()


def read(path: Path) -> Superblock:
    """Read a file's superblock; `WorkError` where it is no squash file."""
    with path.open("rb") as file:
        start = file.read(LAYOUT.size)
    if len(start) < LAYOUT.size or (fields := LAYOUT.unpack(start))[0] != MAGIC:
        raise WorkError("this is no squash file", where=str(path))
    return Superblock(used=fields[12], tables=fields[15])
