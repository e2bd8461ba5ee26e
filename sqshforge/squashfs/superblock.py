"""The first bytes of a squash file: where its parts are (squashfs 4.0, little-endian).

The superblock comes first, then the content of all files, then the tables: who has the content,
the superblock and the tables has the file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from sqshforge.errors import RequestError, WorkError

MAGIC = 0x73717368
LAYOUT = struct.Struct("<5I6H8Q")
VERSION = (4, 0)
BLOCKS = range(12, 21)  # log2 of the bytes in a block: 4 KiB to 1 MiB
FLAGS, FLAGS_PLACE = struct.Struct("<H"), 24
DUPLICATES = 0x40  # of the flags: files of the same content are stored once
NOWHERE = 2**64 - 1  # the place of a table that is not there


@dataclass(frozen=True, kw_only=True)
class Superblock:
    """Places are bytes from the start of the file."""

    inodes: int
    made: int  # seconds of the epoch
    block: int  # bytes of a file's content that are compressed together
    fragments: int  # blocks that hold the ends of several files
    compression: int
    ids: int  # different owners
    root: int  # the inode of the top folder: a place in its table
    used: int  # the length of the file, without what fills its last 4 KiB up
    id_table: int
    xattr_table: int
    inode_table: int
    directory_table: int
    fragment_table: int
    export_table: int

    @property
    def tables(self) -> int:
        """The start of the first table, which is the end of all files' content."""
        return self.inode_table


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


def set_duplicates(path: Path, on: bool) -> None:
    """Write whether a file's duplicates are looked for.

    mksquashfs goes by this where it appends, and not by its options.
    """
    with path.open("r+b") as file:
        file.seek(FLAGS_PLACE)
        (flags,) = FLAGS.unpack(file.read(FLAGS.size))
        file.seek(FLAGS_PLACE)
        file.write(FLAGS.pack(flags | DUPLICATES if on else flags & ~DUPLICATES))


def read(path: Path) -> Superblock:
    """Read a file's superblock; raises as `parse`."""
    with path.open("rb") as file:
        return parse(file.read(LAYOUT.size), path)


def none(path: Path) -> RequestError:
    """What is said of what is no squash file."""
    return RequestError("the file is not a squash file", where=str(path), fix="name a .sqsh file")


def parse(start: bytes, path: Path) -> Superblock:
    """The superblock at the start of a file.

    Raises `RequestError` where there is none, `WorkError` for one of another version.
    """
    if len(start) < LAYOUT.size or (fields := LAYOUT.unpack(start))[0] != MAGIC:
        raise none(path)
    if fields[9:11] != VERSION or fields[6] not in BLOCKS or fields[3] != 1 << fields[6]:
        raise WorkError("this squash file has another version, or is corrupt", where=str(path))
    return Superblock(
        inodes=fields[1],
        made=fields[2],
        block=fields[3],
        fragments=fields[4],
        compression=fields[5],
        ids=fields[8],
        root=fields[11],
        used=fields[12],
        id_table=fields[13],
        xattr_table=fields[14],
        inode_table=fields[15],
        directory_table=fields[16],
        fragment_table=fields[17],
        export_table=fields[18],
    )
