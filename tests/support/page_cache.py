"""Find out how much of a file is in memory, and remove it from there."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
]
LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def forget(path: Path) -> None:
    """Have the kernel drop a file from memory."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_ahead() -> int:
    """Return the most bytes that the kernel reads ahead, on any disk, in a sequential read."""
    found = Path("/sys/class/bdi").glob("*/read_ahead_kb")
    return max(int(path.read_text()) << 10 for path in found)


def share(path: Path, offset: int, length: int) -> float:
    """Return the share of a part of a file that is in memory: 0 to 1."""
    start = offset // PAGE * PAGE
    size = offset + length - start
    with path.open("rb") as file:
        place = LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), start)
    if place in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap", str(path))
    try:
        pages = ctypes.create_string_buffer(-(-size // PAGE))
        if LIBC.mincore(place, size, pages):
            raise OSError(ctypes.get_errno(), "mincore", str(path))
    finally:
        LIBC.munmap(place, size)
    return sum(page & 1 for page in pages.raw) / len(pages)
