"""Where the hot files of a squash file lie, and writing that down in its last bytes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sqshforge.squashfs import superblock
from sqshforge.squashfs.content import LENGTH, fragment
from sqshforge.squashfs.hot_note import MARK, NOTE, HotRange
from sqshforge.squashfs.image import Image, open_image
from sqshforge.squashfs.inode import FILE, NONE

FILLED = 4096  # bytes that a file's size is a multiple of


def locate(path: Path, files: Iterable[bytes]) -> HotRange | None:
    """The bytes that some files take which come first in it; None where they have none.

    The ends of several files share a block, which is written when it is full. So the last of these
    files may have their ends farther on, behind other files: there the range does not go.
    """
    with open_image(path) as image:
        pieces = sorted(piece for file in files for piece in _pieces(image, file))
        gap = image.superblock.block
    if not pieces:
        return None
    start = end = pieces[0][0]
    for place, length in pieces:
        if place > end + gap:
            break
        end = max(end, place + length)
    return HotRange(start, end - start)


def _pieces(image: Image, file: bytes) -> list[tuple[int, int]]:
    """The place and length of a file's own blocks, and of the one that has its end."""
    one = image.inode(file)
    if one is None or one.kind != FILE:
        return []
    found = []
    own = sum(length & LENGTH for length in one.data.blocks)
    if own:
        found.append((one.data.start, own))
    if one.data.fragment != NONE:
        block = fragment(image, one.data.fragment)
        found.append((block.place, block.length & LENGTH))
    return found


def note(path: Path, hot: HotRange) -> None:
    """Write a range to the end of a file, which gets 4 KiB longer where it has no room for it."""
    used = superblock.read(path).used
    size = -(-(used + NOTE.size) // FILLED) * FILLED
    with path.open("r+b") as file:
        file.truncate(used)  # what filled it up before
        file.truncate(size)
        file.seek(size - NOTE.size)
        file.write(NOTE.pack(hot.offset, hot.length, MARK))
