"""A stream of bytes for a parser, which asks for a number of bytes, or skips them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sqshforge.tar.faults import broken


class TarStream:
    """Cuts the pieces that `read` returns, b"" at the end, into the sizes that are asked for.

    `skip`, if given, skips bytes of the source, and returns how many it has skipped.
    """

    def __init__(
        self,
        read: Callable[[], bytes],
        where: str,
        skip: Callable[[int], int] | None = None,
    ) -> None:
        self._read = read
        self._skip = skip
        self._data = b""
        self._at = 0  # position in data
        self._before = 0  # number of bytes before data
        self.where = where

    @property
    def position(self) -> int:
        return self._before + self._at

    def block(self, size: int) -> bytes:
        """Return `size` bytes, or b"" at the end of the stream."""
        end = self._at + size
        if end <= len(self._data):
            piece = self._data[self._at : end]
            self._at = end
            return piece
        if not self._fill(size) and self._at == len(self._data):
            return b""
        return self.take(size)

    def take(self, size: int) -> bytes:
        if self._at + size > len(self._data) and not self._fill(size):
            raise self.ends_early()
        end = self._at + size
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def skip(self, size: int) -> None:
        if size <= len(self._data) - self._at:
            self._at += size
            return
        for _ in self._passed(size, self._skip):
            pass

    def pieces(self, size: int) -> Iterator[bytes]:
        """Yield `size` bytes, in the pieces in which they arrive."""
        return self._passed(size, None)

    def drain(self) -> None:
        """Read to the end of the stream."""
        self._before += len(self._data)
        self._data, self._at = b"", 0
        while more := self._read():
            self._before += len(more)

    def ends_early(self) -> Exception:
        return broken("a tar ends in the middle of an entry", self.where)

    def _passed(self, size: int, skip: Callable[[int], int] | None) -> Iterator[bytes]:
        while size:
            have = min(size, len(self._data) - self._at)
            if have:
                begin = self._at
                self._at += have
                size -= have
                yield self._data[begin : self._at]
                continue
            self._before += len(self._data)
            self._data, self._at = b"", 0
            if skip is not None:
                gone = skip(size)
                self._before += gone
                if gone != size:
                    raise self.ends_early()
                return
            self._data = self._read()
            if not self._data:
                raise self.ends_early()

    def _fill(self, size: int) -> bool:
        """Buffer at least `size` bytes; return False if the stream ends before."""
        pieces = [self._data[self._at :]]
        have = len(pieces[0])
        while have < size and (more := self._read()):
            pieces.append(more)
            have += len(more)
        self._before += self._at
        self._data, self._at = b"".join(pieces), 0
        return have >= size
