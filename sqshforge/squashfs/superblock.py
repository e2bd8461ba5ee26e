"""The first bytes of a squash file: where its parts are (squashfs 4.0, little-endian).

The superblock comes first, then the content of all files, then the tables: together, they are the
whole file.
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
DUPLICATES = 0x40  # flag: files with the same content are stored once
NOWHERE = 2**64 - 1  # the place of a missing table


@dataclass(frozen=True, kw_only=True)
class Superblock:
    """The fields of a superblock. Places of tables are bytes from the start of the file."""

    inodes: int
    made: int  # seconds of the epoch
    block: int  # bytes of a file's content that are compressed at a time
    fragments: int  # blocks that hold the ends of several files
    compression: int
    ids: int  # number of different owners
    root: int  # reference to the root's inode: place of its block in the table, offset in it
    used: int  # length of the file without its padding to 4 KiB
    id_table: int
    xattr_table: int
    inode_table: int
    directory_table: int
    fragment_table: int
    export_table: int

    @property
    def tables(self) -> int:
        """The start of the first table, which is the end of the files' content."""
        return self.inode_table


@dataclass(frozen=True)
class Tables:
    """A squash file without the content of its files: a megabyte or so for a large image."""

    superblock: bytes
    start: int  # start of the tables, in bytes
    rest: bytes  # everything from there to the end

    @classmethod
    def of(cls, path: Path) -> Tables:
        """Read them from a file."""
        start = read(path).tables
        with path.open("rb") as file:
            first = file.read(LAYOUT.size)
            file.seek(start)
            return cls(first, start, file.read())

    def put(self, path: Path) -> None:
        """Restore a file with the same content to the one that these tables were read from."""
        with path.open("r+b") as file:
            file.write(self.superblock)
            file.seek(self.start)
            file.write(self.rest)
            file.truncate()


def set_duplicates(path: Path, on: bool) -> None:
    """Set or clear the flag by which mksquashfs looks for duplicates.

    When appending, mksquashfs goes by this flag, not by its options.
    """
    with path.open("r+b") as file:
        file.seek(FLAGS_PLACE)
        (flags,) = FLAGS.unpack(file.read(FLAGS.size))
        file.seek(FLAGS_PLACE)
        file.write(FLAGS.pack(flags | DUPLICATES if on else flags & ~DUPLICATES))


def read(path: Path) -> Superblock:
    """Read a file's superblock; raises the same errors as `parse`."""
    with path.open("rb") as file:
        return parse(file.read(LAYOUT.size), path)


def none(path: Path) -> RequestError:
    """Return the error for a file that is not a squash file."""
    return RequestError("the file is not a squash file", where=str(path), fix="name a .sqsh file")


def parse(start: bytes, path: Path) -> Superblock:
    """Parse the superblock at the start of a file.

    Raises `RequestError` if there is none, `WorkError` if it is corrupt or of another version.
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
