"""The note in the last bytes of a squash file: where its hot files lie, which is at its start.

The format has no place for such a note, but its readers end where the superblock says, and files
are filled up to 4 KiB: the note is the last of what fills them up. It goes wherever the file goes.
Nodes run this from the image's copy of the runtime: the standard library alone, and Python 3.9.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import IO

NOTE = struct.Struct("<2Q8s")  # offset, length, MARK
MARK = b"sqfs-hot"


@dataclass(frozen=True)
class HotRange:
    """Bytes of a squash file that a start reads."""

    offset: int
    length: int


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
