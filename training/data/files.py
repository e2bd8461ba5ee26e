"""Files that are opened on their first read, by the process that reads them.

What a source needs to know about its files (names, sizes, rows) is found once, on rank 0, and sent
to the other ranks by pickle (training.data.shared); a copy of Maps or ArrowFiles starts with no
file open.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from training.errors import TrainingError

T = TypeVar("T")

OPEN = 256
"""Files kept open at a time: each holds a descriptor, and a process has about a thousand."""
LARGE = 1 << 30
"""Size in bytes from which a set that is read in random order is not read ahead.

A smaller set is soon in memory as a whole, and large reads bring it there sooner.
"""


class Maps:
    """Reads files through memory maps; the last OPEN of them stay mapped.

    random: reads come in random order, so the kernel should read only what is asked for, instead of
    `read_ahead_kb` around it (madvise: MADV_RANDOM for the map, MADV_WILLNEED for each read, as
    MADV_RANDOM alone makes one request per page).
    """

    def __init__(self, *, random: bool = False) -> None:
        self._random = random
        self._maps: dict[str, mmap.mmap] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_random": self._random, "_maps": {}}

    def read(self, path: str, dtype: DTypeLike, begin: int, count: int, size: int) -> NDArray[Any]:
        """Read `count` items, (count,), read-only, from byte `begin` on.

        size: bytes of the whole file. Raises TrainingError if the file cannot be opened, is longer
        than `size` when it is opened, or ends before the last item.
        """
        dtype = np.dtype(dtype)
        length = count * dtype.itemsize
        try:
            mapped = _kept(self._maps, path, lambda: self._map(path, size))
            # Touching a mapped page that the file no longer has would kill the process.
            held = min(mapped.size(), len(mapped))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise TrainingError(f"{path}: cannot be read: {why}", local=True) from error
        if held < begin + length:
            raise TrainingError(f"{path}: became shorter while it was read", local=True)
        if self._random and length:
            page = begin // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_WILLNEED, page, begin + length - page)
        return np.frombuffer(mapped, dtype, count, begin)

    def _map(self, path: str, size: int) -> mmap.mmap:
        with Path(path).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(mapped) > size:
            raise _changed(path, f"{len(mapped):,} bytes", f"{size:,}")
        if self._random:
            mapped.madvise(mmap.MADV_RANDOM)
        return mapped


class ArrowFiles:
    """The files of a set on disk; the last OPEN of them stay open.

    All are opened once, to count their rows. `ends` (files,): the rows up to each file's end.
    Raises what pyarrow raises.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = [str(path) for path in paths]
        rows = [len(_table(path)) for path in self.paths]
        self.ends = list(accumulate(rows))
        self._tables: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def rows(self, begin: int, end: int, most: int) -> Iterator[Any]:
        """Yield rows `begin` ... `end` - 1 in order, as tables of at most `most` rows."""
        while begin < end:
            number = bisect_right(self.ends, begin)
            last = min(end, begin + most, self.ends[number])
            first = self.ends[number - 1] if number else 0
            yield self.table(number).slice(begin - first, last - begin)
            begin = last

    def table(self, number: int) -> Any:
        """Return a file's table. Raises TrainingError if it cannot be read or has changed."""
        return _kept(self._tables, self.paths[number], lambda: self._opened(number))

    def _opened(self, number: int) -> Any:
        path = self.paths[number]
        rows = self.ends[number] - (self.ends[number - 1] if number else 0)
        try:
            table = _table(path)
        except Exception as error:  # pyarrow has errors of its own besides OSError
            reason = " ".join(str(error).split())
            raise TrainingError(f"{path}: cannot be read: {reason}", local=True) from error
        if len(table) != rows:
            raise _changed(path, f"{len(table):,} rows", f"{rows:,}")
        return table


def _kept(opened: dict[str, T], path: str, open_: Callable[[], T]) -> T:
    """Return an open file, or open it; with OPEN of them open, the one opened first is dropped."""
    if path not in opened:
        if len(opened) >= OPEN:
            opened.pop(next(iter(opened)))
        opened[path] = open_()
    return opened[path]


def _table(path: str) -> Any:
    import pyarrow as pa

    return pa.ipc.open_stream(pa.memory_map(path)).read_all()


def _changed(path: str, now: str, before: str) -> TrainingError:
    return TrainingError(
        f"{path}: has {now}, and {before} when rank 0 looked at the data; fix: give all nodes the "
        "same files, and start again",
        local=True,
    )
