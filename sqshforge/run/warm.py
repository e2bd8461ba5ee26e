"""Warm start: read a squash file's hot files into memory while the container starts.

The file notes their range, which is contiguous (squashfs/hot_note.py). One process per machine
reads it once, from front to back, however many containers start. It affects only speed: an error
ends the reading, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from sqshforge.host.cgroups import free_memory
from sqshforge.run.supervisor import close_all_but
from sqshforge.squashfs.hot_note import HotRange, noted

VARIABLE = "WARM"  # of the environment, and of launchers: 0 turns it off
PIECE = 4 << 20  # bytes read at once
USED_AT = 40  # the offset in the superblock of the file's size in bytes, a 64-bit number


def in_background(image: Path) -> None:
    """Start reading in a process that is not a child of this one, but ends with it.

    This process may become the container's command, which must not have a child that it did not
    start.
    """
    if os.environ.get(VARIABLE) == "0":
        return
    starter = os.getpid()
    try:
        between = os.fork()
    except OSError:  # no more processes for this user
        return
    if between:
        # If SIGCHLD is ignored, there is no child to wait for.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(between, 0)
        return
    try:
        if os.fork() == 0:
            os.setsid()
            _leave_streams()
            warm(image, goes_on=lambda: _runs(starter))
    finally:  # also after an error: only the starter may return to the caller
        os._exit(0)


def warm(image: Path, goes_on: Callable[[], bool]) -> None:
    """Read a file's hot range while `goes_on` returns true, unless another process reads it.

    At most half of the free memory is used; the files that a start needs first come first.
    """
    with image.open("rb", buffering=0) as file:
        header = os.pread(file.fileno(), USED_AT + 8, 0)
        hot = noted(file, int.from_bytes(header[USED_AT:], "little"))
        if hot is not None:
            with alone(file) as is_ours:
                if is_ours:
                    _read(file, hot, free_memory() // 2, goes_on)


@contextlib.contextmanager
def alone(file: IO[bytes]) -> Iterator[bool]:
    """Try to become the only process of this machine that reads a file; yield whether it worked.

    The lock is an abstract socket name, which the kernel drops with its process: a lock on the file
    itself would apply to all nodes of a shared file system.
    """
    import socket

    found = os.fstat(file.fileno())
    name = f"\0sqshforge-warm-{found.st_dev}-{found.st_ino}-{found.st_mtime_ns}"
    with socket.socket(socket.AF_UNIX) as held:
        try:
            held.bind(name)
        except OSError:
            yield False
        else:
            yield True


def _read(file: IO[bytes], hot: HotRange, most: int, goes_on: Callable[[], bool]) -> None:
    place, end = hot.offset, hot.offset + min(hot.length, most)
    piece = memoryview(bytearray(PIECE))
    while place < end and goes_on():
        count = os.preadv(file.fileno(), [piece[: end - place]], place)
        if not count:  # the file was truncated
            return
        place += count


def _leave_streams() -> None:
    """Close the caller's files: a reader of its output would wait for every process that has it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    close_all_but({0, 1, 2})


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the number is another user's process by now
        return True
    return True
