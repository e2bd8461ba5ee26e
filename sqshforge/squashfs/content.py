"""The content of the files in a squash file."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from sqshforge.errors import shown
from sqshforge.squashfs.faults import BrokenError
from sqshforge.squashfs.image import Image
from sqshforge.squashfs.inode import FILE, NONE, Entry

PLAIN = 1 << 24  # bit of a block's length: the block is not compressed
LENGTH = PLAIN - 1
KEPT = 4  # most unpacked fragments to keep, of up to 1 MiB each


class Block(NamedTuple):
    """A block of content: where it is stored, and its unpacked size in bytes."""

    place: int
    length: int  # stored bytes, with PLAIN; 0 for a block of zeros, which is not stored
    size: int


@dataclass(frozen=True)
class Content:
    """Reads an image's files. Not thread-safe."""

    image: Image
    _fragments: OrderedDict[int, bytes] = field(default_factory=OrderedDict)

    def read(self, entry: Entry, most: int) -> bytes:
        """Return a file's content; `BrokenError` if it has more than `most` bytes."""
        if entry.size > most:
            raise BrokenError(f"/{shown(entry.path)} has {entry.size} bytes, too many for its kind")
        return b"".join(self.pieces(entry))

    def pieces(self, entry: Entry) -> Iterator[bytes]:
        """Yield a file's content, block by block."""
        for block in blocks(self.image, entry):
            yield self.block(block)
        if entry.inode.data.fragment != NONE:
            yield self.end(entry)

    def block(self, block: Block) -> bytes:
        """Return a block's content."""
        if not block.length:
            return bytes(block.size)
        return _unpacked(self.image, block, exactly=True)

    def end(self, entry: Entry) -> bytes:
        """Return the end of a file, which shares a fragment with other files' ends."""
        data = entry.inode.data
        size = entry.size % self.image.superblock.block
        whole = self._fragment(data.fragment)
        if data.offset + size > len(whole):
            raise BrokenError(f"the end of /{shown(entry.path)} is not where it should be")
        return whole[data.offset : data.offset + size]

    def _fragment(self, number: int) -> bytes:
        if number in self._fragments:
            self._fragments.move_to_end(number)
        else:
            self._fragments[number] = _unpacked(
                self.image, fragment(self.image, number), exactly=False
            )
            while len(self._fragments) > KEPT:
                self._fragments.popitem(last=False)
        return self._fragments[number]


def blocks(image: Image, entry: Entry) -> Iterator[Block]:
    """Yield the blocks of a file, except the fragment that it shares with others."""
    whole, place, left = image.superblock.block, entry.inode.data.start, entry.size
    for length in entry.inode.data.blocks:
        if length & LENGTH > whole:
            raise BrokenError(f"/{shown(entry.path)} has a block that is too large")
        yield Block(place, length, min(whole, left))
        place += length & LENGTH
        left -= min(whole, left)


def fragment(image: Image, number: int) -> Block:
    """Return the block of a fragment."""
    if number >= len(image.fragments):
        raise BrokenError("a file's end is in a fragment that is not there")
    place, length = image.fragments[number]
    if not 0 < length & LENGTH <= image.superblock.block:
        raise BrokenError("a fragment is too large, or empty")
    return Block(place, length, image.superblock.block)


def check(image: Image, jobs: int, advance: Callable[[float], None]) -> None:
    """Unpack every block of every file, `jobs` at once; `BrokenError` for the first broken one.

    `advance` is called with the number of bytes of the squash file as they are read.
    """
    ends: dict[int, int] = {}
    own: set[Block] = set()
    for entry in image.entries.values():
        data = entry.inode.data
        if entry.kind == FILE:
            own.update(block for block in blocks(image, entry) if block.length)
            if data.fragment != NONE:
                end = data.offset + entry.size % image.superblock.block
                ends[data.fragment] = max(end, ends.get(data.fragment, 0))

    def unpack(block: Block) -> int:
        _unpacked(image, block, exactly=True)
        return block.length & LENGTH

    def unpack_fragment(number: int) -> int:
        block = fragment(image, number)
        if len(_unpacked(image, block, exactly=False)) < ends[number]:
            raise BrokenError("a fragment has less than the files' ends that are in it")
        return block.length & LENGTH

    with ThreadPoolExecutor(jobs) as threads:
        for size in threads.map(unpack, sorted(own)):
            advance(size)
        for size in threads.map(unpack_fragment, sorted(ends)):
            advance(size)


def _unpacked(image: Image, block: Block, *, exactly: bool) -> bytes:
    plain, length = bool(block.length & PLAIN), block.length & LENGTH
    found = image.reader.block(block.place, length, block.size, plain=plain)
    if exactly and len(found) != block.size:
        raise BrokenError("a block has less than it should have")
    return found
