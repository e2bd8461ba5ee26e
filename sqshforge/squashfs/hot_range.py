"""Where the hot files of a squash file lie: at its start, and noted in its last bytes.

The format has no place for such a note, but its readers end where the superblock says, and files
are filled up to 4 KiB: the note is the last of what fills them up. It goes wherever the file goes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sqshforge.squashfs import superblock
from sqshforge.squashfs.content import LENGTH, fragment
from sqshforge.squashfs.image import Image, open_image
from sqshforge.squashfs.inode import FILE, NONE

NOTE = struct.Struct("<2Q8s")  # offset, length, MARK: the last bytes of the file
MARK = b"sqfs-hot"
FILLED = 4096  # bytes that a file's size is a multiple of


@dataclass(frozen=True)
class HotRange:
    """Bytes of a squash file that a start reads."""

    offset: int
    length: int


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


def noted(file: IO[bytes], used: int) -> HotRange | None:
    """The range that an open file has at its end; None for no such note, and for one that lies.

    `used` is the length of the file by its superblock.
    """
    size = os.fstat(file.fileno()).st_size
    if size < used + NOTE.size:
        return None
    offset, length, mark = NOTE.unpack(os.pread(file.fileno(), NOTE.size, size - NOTE.size))
    if mark != MARK or not length or offset + length > used:
        return None
    return HotRange(offset, length)
