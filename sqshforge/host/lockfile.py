"""One process at a time at one piece of work, told to those who wait."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from sqshforge.host.terminal import Reporter


@contextlib.contextmanager
def alone(lock: Path, waiting: str, reporter: Reporter) -> Iterator[None]:
    """Hold a lock for the length of a block; `waiting` is said where somebody else has it.

    The kernel drops the lock with its holder, however that ends; the file goes with the block.
    """
    told = False
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    reporter.say(waiting)
                told = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The one before us may have removed the file that we have waited for.
            if not _is(lock, descriptor):
                continue
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return
        finally:
            os.close(descriptor)


def _is(path: Path, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False
