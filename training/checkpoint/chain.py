"""The files of a folder's claims, and the one that counts."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from training.checkpoint.holder import Holder

FILE = ".running"
_COUNT = 20  # digits of the counter, so that it can be written over in place


@dataclass(frozen=True)
class Found:
    """A claim as it was read; holder is None where it was cut off by a kill."""

    path: Path
    holder: Holder | None
    text: str  # all of it, which differs once it has been renewed

    @property
    def next(self) -> Path:
        """Where the claim that follows this one is."""
        if self.holder is None:
            return self.path.with_name(f"{self.path.name}.torn")
        return self.path.with_name(f"{FILE}.{self.holder.id}")


def chain(folder: Path) -> list[Found]:
    """Read the claims of a folder; the last counts. Raises OSError."""
    found: list[Found] = []
    path = folder / FILE
    while (text := _read(path)) is not None:
        found.append(Found(path, Holder.of(text.partition("\n")[0]), text))
        path = found[-1].next
    return found


def make(path: Path, holder: Holder) -> int:
    """Make a claim's file, which must not be there, and give its descriptor. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    text = f"{holder.line}\n{0:0{_COUNT}}\n".encode()
    try:
        if os.write(file, text) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file)
    except OSError:
        os.close(file)
        path.unlink()
        raise
    return file


def renew(file: int, holder: Holder, count: int) -> None:
    """Write the counter where it is: it takes no room, and a file that was replaced stays so."""
    os.pwrite(file, f"{count:0{_COUNT}}\n".encode(), len(holder.line.encode()) + 1)
    os.fsync(file)  # else other hosts would not see it


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        # On a shared disk one that is replaced while it is read is stale, not missing.
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise
