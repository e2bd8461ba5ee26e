"""One process at a time at one piece of work, told to those who wait."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from sqshforge.progress import Reporter


@contextlib.contextmanager
def alone(lock: Path, waiting: str, reporter: Reporter) -> Iterator[None]:
    """Hold a lock for the length of a block; `waiting` is said where somebody else has it.

    The kernel drops the lock with its holder, however that ends.
    """
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reporter.say(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
