"""Inodes: the metadata of the files in a squash file."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import NamedTuple

from sqshforge.squashfs.faults import BrokenError
from sqshforge.squashfs.tables import Table

NONE = 0xFFFFFFFF  # no fragment, or no extended attributes
HEADER = struct.Struct("<4H2I")
KINDS = ("", "folder", "file", "link", "block device", "character device", "FIFO", "socket")
FOLDER, FILE, LINK = KINDS[1:4]
EXTENDED = 7  # added to a kind's number if the inode has more fields
LONGEST = 4096  # most bytes of a link's target, as in Linux

BASIC_FOLDER = struct.Struct("<2I2HI")  # block, links, size, offset, parent
MORE_FOLDER = struct.Struct("<4I2HI")  # links, size, block, parent, index, offset, xattrs
BASIC_FILE = struct.Struct("<4I")  # start, fragment, offset, size
MORE_FILE = struct.Struct("<3Q4I")  # start, size, sparse, links, fragment, offset, xattrs
BASIC_LINK = struct.Struct("<2I")  # links, size
DEVICE = struct.Struct("<2I")  # links, device
OTHER = struct.Struct("<I")  # links
XATTRS = struct.Struct("<I")


class Data(NamedTuple):
    """Where a file's content is: its blocks, one after the other, and its end in a fragment."""

    start: int = 0
    blocks: tuple[int, ...] = ()  # stored lengths, with a bit for an uncompressed block
    fragment: int = NONE
    offset: int = 0  # in the fragment's content


class Inode(NamedTuple):
    """A file without its names. `owner` and `group` are indexes into the table of ids."""

    kind: str
    mode: int
    owner: int
    group: int
    mtime: int  # seconds of the epoch
    number: int
    links: int
    size: int  # bytes of a file's content, or of a folder's listing plus 3
    target: bytes
    device: int
    xattrs: int
    data: Data
    listing: tuple[int, int]  # a folder's: block in the table, offset in the block


class Entry(NamedTuple):
    """A file under one of its names."""

    path: bytes  # relative to the root, whose own path is empty
    kind: str
    mode: int  # the last twelve bits
    uid: int
    gid: int
    mtime: int  # seconds of the epoch
    size: int  # bytes of a file's content or of a link's target
    target: bytes
    device: tuple[int, int]  # major, minor
    inode: Inode


def read(table: Table, place: int, block: int) -> Inode:
    """Read the inode at a place of its table; `block` is the size of a content block in bytes."""
    code, mode, owner, group, mtime, number = HEADER.unpack(table.cut(place, HEADER.size))
    more, kind = code > EXTENDED, code - EXTENDED if code > EXTENDED else code
    if not 0 < kind < len(KINDS):
        raise BrokenError(f"it has an inode of an invalid type ({code})")
    place += HEADER.size
    links, size, target, device, xattrs, data, listing = 1, 0, b"", 0, NONE, Data(), (0, 0)
    if KINDS[kind] == FOLDER:
        if more:
            fields = MORE_FOLDER.unpack(table.cut(place, MORE_FOLDER.size))
            links, size, start, _, _, offset, xattrs = fields
        else:
            start, links, size, offset, _ = BASIC_FOLDER.unpack(table.cut(place, BASIC_FOLDER.size))
        listing = (start, offset)
    elif KINDS[kind] == FILE:
        if more:
            fields = MORE_FILE.unpack(table.cut(place, MORE_FILE.size))
            start, size, _, links, fragment, offset, xattrs = fields
            place += MORE_FILE.size
        else:
            start, fragment, offset, size = BASIC_FILE.unpack(table.cut(place, BASIC_FILE.size))
            place += BASIC_FILE.size
        count = -(-size // block) if fragment == NONE else size // block
        data = Data(
            start, struct.unpack(f"<{count}I", table.cut(place, 4 * count)), fragment, offset
        )
    elif KINDS[kind] == LINK:
        links, size = BASIC_LINK.unpack(table.cut(place, BASIC_LINK.size))
        if size > LONGEST:
            raise BrokenError("it has a link with a target that is too long")
        target = table.cut(place + BASIC_LINK.size, size)
        if more:
            (xattrs,) = XATTRS.unpack(table.cut(place + BASIC_LINK.size + size, XATTRS.size))
    else:
        shape = DEVICE if "device" in KINDS[kind] else OTHER
        links, *rest = shape.unpack(table.cut(place, shape.size))
        device = rest[0] if rest else 0
        if more:
            (xattrs,) = XATTRS.unpack(table.cut(place + shape.size, XATTRS.size))
    return Inode(
        KINDS[kind], mode & 0o7777, owner, group, mtime, number, links, size, target, device,
        xattrs, data, listing,
    )  # fmt: skip


@dataclass
class Inodes:
    """The inodes of a table, each read once, however many names it has."""

    table: Table
    block: int  # size of a content block in bytes
    _read: dict[int, Inode] = field(default_factory=dict)
    _blocks: int = 0

    def at(self, start: int, offset: int) -> Inode:
        """Return the inode at `offset` in the block that starts at `start` of the table."""
        place = self.table.place(start, offset)
        if place not in self._read:
            self._read[place] = found = read(self.table, place, self.block)
            self._blocks += len(found.data.blocks)
            # Overlapping lists of blocks could together be far longer than the table.
            if 4 * self._blocks > len(self.table.data):
                raise BrokenError("its files have more blocks than there are")
        return self._read[place]


def numbers(device: int) -> tuple[int, int]:
    """Return the major and minor number of a device, from Linux's 32-bit encoding."""
    return (device & 0xFFF00) >> 8, (device & 0xFF) | ((device >> 12) & 0xFFF00)
