"""A squash file as a tree of entries, with their extended attributes."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sqshforge.errors import RequestError, WorkError, shown
from sqshforge.squashfs import codec, inode, superblock
from sqshforge.squashfs.faults import BrokenError
from sqshforge.squashfs.inode import FOLDER, LINK, Entry, Inode, Inodes
from sqshforge.squashfs.superblock import NOWHERE, Superblock
from sqshforge.squashfs.tables import Reader, Table

XATTR_START = struct.Struct("<Q2I")  # place of all names and values, number of sets
XATTR_SET = struct.Struct("<Q2I")  # place of a set's first name, number of names, their bytes
XATTR_NAME = struct.Struct("<2H")  # prefix, length of the rest of the name
PREFIXES = (b"user.", b"trusted.", b"security.")
ELSEWHERE = 0x100  # bit of the prefix: the value is stored elsewhere, at the place given instead

RUN = struct.Struct("<3I")  # run of names in a listing: count - 1, their inodes' block, number
NAME = struct.Struct("<HhHH")  # place of the inode in that block, number, kind, length - 1
FRAGMENT = struct.Struct("<Q2I")  # place, length, unused
LINKS = 40  # most links to follow for one path, as in Linux
LONGEST_NAME, LONGEST_PATH = 255, 4096  # bytes, as in Linux
# Most memory for all entries, in bytes, as a small file can name many, with long paths. A file
# larger than TREE may use as many bytes as it has itself. ENTRY is the measured size of an entry
# without its path and target.
TREE = 1 << 30
ENTRY = 800
UNSEEN = 3  # bytes that a folder's size includes for . and .., which are not in its listing


@dataclass(frozen=True)
class Attributes:
    """Sets of names and values, which inodes refer to by number."""

    table: Table
    sets: list[bytes]

    @classmethod
    def read(cls, reader: Reader, place: int) -> Attributes:
        """Read the table at a place of the file."""
        if place == NOWHERE:
            raise BrokenError("it has extended attributes, and no table of them")
        start, count, _ = XATTR_START.unpack(reader.at(place, XATTR_START.size))
        sets = list(reader.indexed(place + XATTR_START.size, count, XATTR_SET.size))
        (end,) = struct.unpack("<Q", reader.at(place + XATTR_START.size, 8))
        return cls(Table.of(reader, start, end), sets)

    def of(self, number: int) -> dict[bytes, bytes]:
        """Return the names and values of a set."""
        if number >= len(self.sets):
            raise BrokenError("a file's extended attributes are missing")
        first, count, _ = XATTR_SET.unpack(self.sets[number])
        place = self.table.place(first >> 16, first & 0xFFFF)
        found = {}
        for _ in range(count):
            kind, length = XATTR_NAME.unpack(self.table.cut(place, XATTR_NAME.size))
            place += XATTR_NAME.size
            if kind & 0xFF >= len(PREFIXES):
                raise BrokenError("an extended attribute has an invalid type")
            name = PREFIXES[kind & 0xFF] + self.table.cut(place, length)
            place += length
            value, place = self._value(place)
            if kind & ELSEWHERE:
                if len(value) != 8:
                    raise BrokenError("an extended attribute has an invalid offset")
                (where,) = struct.unpack("<Q", value)
                value, _ = self._value(self.table.place(where >> 16, where & 0xFFFF))
            found[name] = value
        return found

    def _value(self, place: int) -> tuple[bytes, int]:
        (length,) = struct.unpack("<I", self.table.cut(place, 4))
        return self.table.cut(place + 4, length), place + 4 + length


@dataclass(frozen=True)
class Image:
    """An open squash file. Every fault in it raises `BrokenError`."""

    path: Path
    reader: Reader
    superblock: Superblock

    @property
    def compression(self) -> str:
        return codec.NAMES[self.superblock.compression]

    @cached_property
    def entries(self) -> dict[bytes, Entry]:
        """All entries by path, each folder before its contents, names in sorted order."""
        found: dict[bytes, Entry] = {}
        seen: set[int] = set()
        inodes = Inodes(self._inodes, self.superblock.block)
        todo = [(b"", inodes.at(self.superblock.root >> 16, self.superblock.root & 0xFFFF))]
        if todo[0][1].kind != FOLDER:
            raise BrokenError("its root is not a folder")
        listed = memory = 0
        while todo:
            path, one = todo.pop()
            found[path] = self._entry(path, one)
            if one.kind != FOLDER:
                continue
            listed += one.size
            if one.number in seen or listed > len(self._directories.data) + UNSEEN * len(found):
                raise BrokenError(f"the folder /{shown(path)} is in it twice")
            seen.add(one.number)
            above = path + b"/" if path else b""
            within = []
            for name, block, offset in self._listing(one):
                below = (above + name, inodes.at(block, offset))
                if len(below[0]) > LONGEST_PATH:
                    raise BrokenError(f"a path is longer than Linux can hold: /{shown(below[0])}")
                memory += ENTRY + len(below[0]) + len(below[1].target)
                if memory > max(TREE, self.reader.size):
                    raise BrokenError("its entries and their paths take too much memory")
                within.append(below)
            todo += reversed(within)  # the last one is popped first
        return found

    def find(self, path: bytes) -> Entry | None:
        """Return the entry at a path, following links as in a container; None if there is none."""
        here, followed = b"", 0
        todo = path.split(b"/")[::-1]
        while todo:
            name = todo.pop()
            if name == b"..":
                here = here.rpartition(b"/")[0]
            if name in (b"", b".", b".."):
                continue
            below = here + b"/" + name if here else name
            one = self.inode(below)
            if one is None or followed > LINKS:
                return None
            if one.kind == LINK:
                followed += 1
                here = b"" if one.target.startswith(b"/") else here
                todo += one.target.split(b"/")[::-1]
            else:
                here = below
        found = self.inode(here)
        return None if found is None else self._entry(here, found)

    def inode(self, path: bytes) -> Inode | None:
        """Return the inode at a path without following links; None if there is none.

        Only the folders on the way are read, each once.
        """
        if not path:
            return self._root
        above, slash, name = path.rpartition(b"/")
        folder = self.inode(above) if slash else self._root
        if folder is None or folder.kind != FOLDER:
            return None
        if folder.number not in self._listed:
            self._listed[folder.number] = {
                name: (block, offset) for name, block, offset in self._listing(folder)
            }
        place = self._listed[folder.number].get(name)
        return None if place is None else self._some_inodes.at(*place)

    @cached_property
    def _listed(self) -> dict[int, dict[bytes, tuple[int, int]]]:
        return {}

    @cached_property
    def _some_inodes(self) -> Inodes:
        return Inodes(self._inodes, self.superblock.block)

    @cached_property
    def _root(self) -> Inode:
        return self._some_inodes.at(self.superblock.root >> 16, self.superblock.root & 0xFFFF)

    @cached_property
    def fragments(self) -> list[tuple[int, int]]:
        """The place and length of each fragment, a block that holds the ends of files."""
        entries = self.reader.indexed(
            self.superblock.fragment_table, self.superblock.fragments, FRAGMENT.size
        )
        return [FRAGMENT.unpack(one)[:2] for one in entries]

    def xattrs(self, entry: Entry) -> dict[bytes, bytes]:
        """Return an entry's extended attributes, by name."""
        if entry.inode.xattrs == inode.NONE:
            return {}
        return self._attributes.of(entry.inode.xattrs)

    @cached_property
    def _attributes(self) -> Attributes:
        return Attributes.read(self.reader, self.superblock.xattr_table)

    @cached_property
    def _owners(self) -> list[int]:
        entries = self.reader.indexed(self.superblock.id_table, self.superblock.ids, 4)
        return [int.from_bytes(one, "little") for one in entries]

    @cached_property
    def _inodes(self) -> Table:
        begin, end = self.superblock.inode_table, self.superblock.directory_table
        return Table.of(self.reader, begin, end)

    @cached_property
    def _directories(self) -> Table:
        """The table of listings, which ends where the first block of the next table begins."""
        block, begin = self.superblock, self.superblock.directory_table
        lists = [block.id_table, block.export_table]
        if block.fragments:
            lists.append(block.fragment_table)
        first = (self.reader.at(place, 8) for place in lists if place != NOWHERE)
        end = min(struct.unpack("<Q", place)[0] for place in first)
        return Table.of(self.reader, begin, end)

    def _entry(self, path: bytes, one: Inode) -> Entry:
        if max(one.owner, one.group) >= len(self._owners):
            raise BrokenError(f"/{shown(path)} has an owner that its table lacks")
        return Entry(
            path=path,
            kind=one.kind,
            mode=one.mode,
            uid=self._owners[one.owner],
            gid=self._owners[one.group],
            mtime=one.mtime,
            size=one.size if one.kind in (inode.FILE, LINK) else 0,
            target=one.target,
            device=inode.numbers(one.device),
            inode=one,
        )

    def _listing(self, folder: Inode) -> Iterator[tuple[bytes, int, int]]:
        """Yield the names in a folder, each with its inode's block and the offset in that block."""
        table = self._directories
        place = table.place(*folder.listing) if folder.size > UNSEEN else 0
        end = place + max(0, folder.size - UNSEEN)
        last = b""
        while place < end:
            count, block, _ = RUN.unpack(table.cut(place, RUN.size))
            place += RUN.size
            for _ in range(count + 1):
                offset, _, _, length = NAME.unpack(table.cut(place, NAME.size))
                place += NAME.size
                if length >= LONGEST_NAME:
                    raise BrokenError("it has an entry with a name that is too long")
                name = table.cut(place, length + 1)
                place += length + 1
                if name in (b".", b"..") or b"/" in name or b"\0" in name:
                    raise BrokenError(f"it has an entry with the name {name!r}")
                if name <= last or place > end:
                    raise BrokenError("the names in a folder are out of order")
                last = name
                yield name, block, offset


@contextmanager
def open_image(path: Path) -> Iterator[Image]:
    """Open a squash file; a `BrokenError` raised while it is open gets its path as `where`.

    Raises `RequestError` if it does not exist or is not a squash file, `WorkError` if it cannot be
    read.
    """
    try:
        if path.is_fifo():  # opening it would wait for a writer
            raise superblock.none(path)
        file = path.open("rb")
    except (FileNotFoundError, IsADirectoryError):
        raise RequestError(
            "there is no such squash file", where=str(path), fix="sqshforge pack makes one"
        ) from None
    except OSError as error:
        raise WorkError(f"it cannot be read: {error.strerror}", where=str(path)) from None
    with file:
        size = os.fstat(file.fileno()).st_size
        block = superblock.parse(file.read(superblock.LAYOUT.size), path)
        reader = Reader(file, min(size, block.used), codec.unpacker(block.compression))
        try:
            if block.used > size:
                raise BrokenError(f"it has {size} of its {block.used} bytes")
            yield Image(path, reader, block)
        except BrokenError as error:
            error.where = error.where or str(path)
            raise
