"""What a start reads of a squash file is brought into memory while the container starts.

The file notes where that lies, in one piece (squashfs/hot_note.py). It is read once, from front to
back, by one process of the machine, whatever number of containers start. Only speed hangs on it:
what goes wrong ends it, and nothing else.
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
PIECE = 4 << 20  # bytes that are read at once
USED_AT = 40  # where the superblock says how many bytes the file has, a 64-bit number


def in_background(image: Path) -> None:
    """Begin to read, in a process that is nobody's child and ends with this one.

    This process may become the container's command, which is to find no child that it did not
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
        # Where SIGCHLD is ignored nobody can be waited for.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(between, 0)
        return
    try:
        if os.fork() == 0:
            os.setsid()
            _leave_streams()
            warm(image, goes_on=lambda: _runs(starter))
    finally:  # also of an error: what called this goes on in the starter alone
        os._exit(0)


def warm(image: Path, goes_on: Callable[[], bool]) -> None:
    """Read what a file notes as hot, as long as `goes_on` says so, where nobody else does.

    At most half of the free memory is taken; what a start uses first comes first.
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
    """Be the one on this machine who reads a file; gives whether that came about.

    By a name of the kernel's that is gone with its process: a lock of the file itself would hold
    for all nodes of a shared file system.
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
        if not count:  # the file has become shorter
            return
        place += count


def _leave_streams() -> None:
    """Hold nothing of the caller's: who reads its output waits for all that may write."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    close_all_but({0, 1, 2})


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's by now
        return True
    return True
