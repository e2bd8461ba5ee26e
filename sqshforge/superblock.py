"""The first bytes of a squash file: where its parts are (squashfs 4.0, little-endian)."""

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


def read(path: Path) -> Superblock:
    """Read a file's superblock; `WorkError` where it is no squash file."""
    with path.open("rb") as file:
        start = file.read(LAYOUT.size)
    if len(start) < LAYOUT.size or (fields := LAYOUT.unpack(start))[0] != MAGIC:
        raise WorkError("this is no squash file", where=str(path))
    return Superblock(used=fields[12], tables=fields[15])
