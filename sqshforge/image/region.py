"""A part of a file, read in place: a blob of a folder is a whole one, one in a tar is a slice."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqshforge.errors import RequestError, WorkError
from sqshforge.tar.faults import refused


class File:
    """An open regular file that is seen to stay what it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Without waiting for the writer of a FIFO.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error.strerror}") from None
        self._first = os.fstat(self._descriptor)
        if not stat.S_ISREG(self._first.st_mode):
            self.close()
            raise RequestError(
                f"{path} is no regular file", mend="save the archive to a file first"
            )
        self.size = self._first.st_size

    def read(self, count: int, offset: int) -> bytes:
        try:
            return os.pread(self._descriptor, count, offset)
        except OSError as error:
            raise WorkError(f"{self.path} cannot be read: {error.strerror}") from None

    def check_unchanged(self) -> None:
        """Raise `WorkError` where it was written to since it was opened."""
        now = os.fstat(self._descriptor)
        if (now.st_size, now.st_mtime_ns) != (self._first.st_size, self._first.st_mtime_ns):
            raise WorkError(
                f"{self.path} was written to while it was read", mend="start again when it is done"
            )

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True)
class Region:
    """Bytes of a file, from `start` on."""

    file: File
    start: int
    size: int

    @property
    def place(self) -> tuple[Path, int]:
        """The same for the same bytes."""
        return self.file.path, self.start

    def whole(self, limit: int, what: str) -> bytes:
        """All of it at once; a large one is refused before it is read."""
        if self.size > limit:
            raise refused(
                f"{what} has {self.size} bytes, and {limit} are the most",
                str(self.file.path),
                "see whether the address is that of an image",
            )
        return self.file.read(self.size, self.start)

    def first(self, count: int) -> bytes:
        return self.file.read(min(count, self.size), self.start)


class Reader(io.RawIOBase):
    """Reads a region from its begin; all that passes is handed to `see` too."""

    def __init__(self, region: Region, see: Callable[[bytes], None] | None = None) -> None:
        self._region = region
        self.see = see
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        left = self._region.size - self._at
        count = left if size < 0 else min(size, left)
        data = self._region.file.read(count, self._region.start + self._at) if count else b""
        self._at += len(data)
        if self.see is not None and data:
            self.see(data)
        return data

    def skip(self, count: int) -> int:
        """Go on without reading; gives how far that was possible."""
        count = min(count, self._region.size - self._at)
        self._at += count
        return count
