"""Squash files that no tool makes, written table by table: nested folders, and many names."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from sqshforge.squashfs.image import NAME, RUN
from sqshforge.squashfs.inode import EXTENDED, HEADER, MORE_FOLDER, NONE, OTHER
from sqshforge.squashfs.superblock import LAYOUT, MAGIC, NOWHERE, VERSION
from sqshforge.squashfs.tables import METADATA, PLAIN

FOLDER, FIFO = 1, 6  # type numbers of inodes
FOLDER_SIZE = HEADER.size + MORE_FOLDER.size
LISTED = 256  # names in one run of a directory listing
GZIP, LOG2_BLOCK = 1, 17


def chain(name: bytes, depth: int, bottom: Sequence[bytes] = ()) -> bytes:
    """A file with `depth` folders, each in the one before it, and FIFOs in the last one.

    `bottom` are their names, in order; they are all one FIFO.
    """
    inodes, listings = bytearray(), bytearray()
    for level in range(depth + 1):
        below = level + 1
        names, kind = ([name], FOLDER) if level < depth else (bottom, FIFO)
        listing = _listing(names, below * FOLDER_SIZE, below + 1, kind)
        block, offset = _place(len(listings))
        inodes += HEADER.pack(FOLDER + EXTENDED, 0o755, 0, 0, 0, level + 1)
        inodes += MORE_FOLDER.pack(2, len(listing) + 3, block, 0, 0, offset, NONE)
        listings += listing
    inodes += HEADER.pack(FIFO, 0o644, 0, 0, 0, depth + 2) + OTHER.pack(1)
    return _file(bytes(inodes), bytes(listings))


def _place(at: int) -> tuple[int, int]:
    """Return a byte's position in a table: the position of its block, and the offset in it."""
    return at // METADATA * (METADATA + 2), at % METADATA


def _listing(names: Sequence[bytes], place: int, number: int, kind: int) -> bytes:
    """Return a folder's listing of names that all have the same inode."""
    block, offset = _place(place)
    found = bytearray()
    for start in range(0, len(names), LISTED):
        run = names[start : start + LISTED]
        found += RUN.pack(len(run) - 1, block, number)
        for name in run:
            found += NAME.pack(offset, 0, kind, len(name) - 1) + name
    return bytes(found)


def _table(data: bytes) -> bytes:
    pieces = (data[at : at + METADATA] for at in range(0, len(data), METADATA))
    return b"".join(struct.pack("<H", PLAIN | len(one)) + one for one in pieces)


def _file(inodes: bytes, listings: bytes) -> bytes:
    inode_table = LAYOUT.size
    directory_table = inode_table + len(_table(inodes))
    owners = directory_table + len(_table(listings))
    id_table = owners + len(_table(bytes(4)))
    used = id_table + 8
    superblock = LAYOUT.pack(
        *(MAGIC, 1, 0, 1 << LOG2_BLOCK, 0),
        *(GZIP, LOG2_BLOCK, 0, 1, *VERSION),
        *(0, used, id_table, NOWHERE, inode_table, directory_table, NOWHERE, NOWHERE),
    )
    tables = _table(inodes) + _table(listings) + _table(bytes(4)) + struct.pack("<Q", owners)
    return superblock + tables
