"""The note in the last bytes of a squash file: where its hot files are, which is near its start.

The format has no place for such a note, but readers stop where the superblock says that the file
ends, and files are padded to 4 KiB: the note is the end of the padding, so it stays with the file.
Nodes run this module from the image's copy of the runtime: standard library only, Python 3.9.
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
    """The range of a squash file that a start reads, in bytes."""

    offset: int
    length: int


def noted(file: IO[bytes], used: int) -> HotRange | None:
    """Read the note at the end of an open file; None without one, or if its range is invalid.

    `used` is the file's length according to its superblock.
    """
    size = os.fstat(file.fileno()).st_size
    if size < used + NOTE.size:
        return None
    offset, length, mark = NOTE.unpack(os.pread(file.fileno(), NOTE.size, size - NOTE.size))
    if mark != MARK or not length or offset + length > used:
        return None
    return HotRange(offset, length)
