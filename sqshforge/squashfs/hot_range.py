"""Find where the hot files of a squash file are, and note that in its last bytes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sqshforge.squashfs import superblock
from sqshforge.squashfs.content import LENGTH, fragment
from sqshforge.squashfs.hot_note import MARK, NOTE, HotRange
from sqshforge.squashfs.image import Image, open_image
from sqshforge.squashfs.inode import FILE, NONE

FILLED = 4096  # a file's size is padded to a multiple of this, in bytes


def locate(path: Path, files: Iterable[bytes]) -> HotRange | None:
    """Return the range of the given files, which are packed first; None if they have no content.

    The ends of several files share a block, which is written when it is full. The ends of the last
    of these files may thus come later, after other files; the range does not include those.
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
    """Return the place and length of a file's own blocks, and of the fragment with its end."""
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
    """Write a range into a file's padding, which grows by 4 KiB if there is no room for it."""
    used = superblock.read(path).used
    size = -(-(used + NOTE.size) // FILLED) * FILLED
    with path.open("r+b") as file:
        file.truncate(used)  # remove the old padding
        file.truncate(size)
        file.seek(size - NOTE.size)
        file.write(NOTE.pack(hot.offset, hot.length, MARK))
