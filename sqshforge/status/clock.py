"""What time it is where a run's files lie.

The age of a file is asked of the file system that gave it its time: the clock of the node that
one logs in to may be minutes off. A file without a name is made and asked for its time; it leaves
nothing, not even a changed folder. File systems without such files (NFS) get one with a name for a
moment, in a folder above the run's. Where neither can be, this machine's clock has to do.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

OWN = "this machine's clock"
THEIRS = "the file system's clock"


@dataclass(frozen=True)
class Clock:
    """A clock by its distance from this machine's, in seconds, and whose it is."""

    ahead: float
    whose: str

    @classmethod
    def of(cls, folder: Path) -> Clock:
        """The clock of the file system that a folder is on."""
        before = time.time()
        stamp = _unnamed(folder)
        if stamp is None:
            stamp = _named(folder)
        return cls(0.0, OWN) if stamp is None else cls(stamp - before, THEIRS)

    def now(self) -> float:
        """Seconds of the epoch."""
        return time.time() + self.ahead

    def age(self, moment: float) -> float:
        """Seconds since a moment of this clock; none is less than 0."""
        return max(0.0, self.now() - moment)


def _unnamed(folder: Path) -> float | None:
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
    except OSError:
        return None
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def _named(folder: Path) -> float | None:
    """Ask the nearest folder above, of the same file system, that takes a file."""
    try:
        folder = folder.resolve()
        device = folder.stat().st_dev
        for above in folder.parents:
            if above.stat().st_dev != device:
                return None
            if os.access(above, os.W_OK | os.X_OK):
                with tempfile.NamedTemporaryFile(prefix=".sqshforge-clock-", dir=above) as file:
                    return os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
    return None
