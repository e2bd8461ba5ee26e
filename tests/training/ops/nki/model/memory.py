"""Memory of a NeuronCore: HBM, SBUF and PSUM, with their limits, and records of reads and writes.

Uninitialized memory is NaN. Inputs cannot be written. Indices must be in bounds. If one iteration
of an affine_range reads or writes something, no other may have written it, and if it writes
something, no other may have read it: such loops may run in any order, or in parallel.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

PARTITIONS = 128
SBUF_BYTES = 192 * 1024  # per partition, NeuronCore-v2
PSUM_BYTES = 16 * 1024  # per partition: 8 banks
BANK_BYTES = 2 * 1024
FRESH = -1  # touched by no iteration


class ViolationError(Exception):
    """A kernel did what NKI's documents forbid, or what this model does not know."""


@dataclass(eq=False)
class Loop:
    """A running affine_range: its iteration, and which one last read and wrote each element."""

    iteration: int = 0
    seen: weakref.WeakKeyDictionary[Storage, tuple[NDArray[np.int32], NDArray[np.int32]]] = field(
        default_factory=weakref.WeakKeyDictionary
    )


@dataclass
class Core:
    """The current state: the parallel loops that run, and the bytes in use per partition."""

    random: np.random.Generator
    loops: list[Loop] = field(default_factory=list)
    used: dict[str, int] = field(default_factory=lambda: {"sbuf": 0, "psum": 0})

    def release(self, buffer: str, size: int) -> None:
        self.used[buffer] -= size


_running: list[Core] = []


def core() -> Core:
    if not _running:
        raise ViolationError("no kernel runs")
    return _running[-1]


def start(seed: int) -> None:
    _running.append(Core(np.random.default_rng(seed)))


def stop() -> None:
    _running.pop()


@dataclass(frozen=True)
class Slice:
    """nl.ds: `size` elements from `start`."""

    start: int
    size: int


class Storage:
    """One allocation: its values, and where it has been written."""

    def __init__(self, values: NDArray[Any], buffer: str, readonly: bool) -> None:
        self.values, self.buffer, self.readonly = values, buffer, readonly
        self.within = list(core().loops)
        self.written = np.zeros(values.size, bool)
        if buffer in core().used:
            size = values.nbytes // values.shape[0]
            core().used[buffer] += size
            limit = SBUF_BYTES if buffer == "sbuf" else PSUM_BYTES
            if core().used[buffer] > limit:
                raise ViolationError(f"{buffer} is full: over {limit} bytes of a partition")
            weakref.finalize(self, core().release, buffer, size)

    def touch(self, ids: NDArray[np.int64], *, write: bool, accumulate: bool = False) -> None:
        """Record who reads or writes; accumulating into one place is not a dependency."""
        for loop in [] if self.readonly else core().loops:
            if loop in self.within:
                continue
            if self not in loop.seen:
                fresh = np.full(self.values.size, FRESH, np.int32)
                loop.seen[self] = fresh, fresh.copy()
            readers, writers = loop.seen[self]
            if write and _another(readers[ids], loop.iteration):
                raise ViolationError("an iteration of affine_range writes what another reads")
            if not accumulate and _another(writers[ids], loop.iteration):
                what = "writes" if write else "reads"
                raise ViolationError(f"an iteration of affine_range {what} what another writes")
            (writers if write else readers)[ids] = loop.iteration
        if write:
            self.written[ids] = True


def _another(seen: NDArray[np.int32], iteration: int) -> bool:
    return bool(((seen != FRESH) & (seen != iteration)).any())


class Tensor:
    """An allocation or a part of one. In SBUF and PSUM, axis 0 is the partitions."""

    def __init__(self, storage: Storage, values: NDArray[Any], ids: NDArray[np.int64]) -> None:
        self.storage, self.values, self.ids = storage, values, ids

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    @property
    def buffer(self) -> str:
        return self.storage.buffer

    def __getitem__(self, index: Any) -> Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) > len(self.shape):
            raise ViolationError(f"{len(parts)} indices for a shape {self.shape}")
        found = tuple(
            self._inside(part, axis, size)
            for axis, (part, size) in enumerate(zip(parts, self.shape, strict=False))
        )
        return type(self)(self.storage, self.values[found], self.ids[found])

    def _inside(self, part: Any, axis: int, size: int) -> slice | int:
        if isinstance(part, (int, np.integer)):
            if axis == 0 and self.buffer in ("sbuf", "psum"):
                raise ViolationError("the partition axis of a tile cannot be dropped")
            first, last = int(part), int(part) + 1
        elif isinstance(part, Slice):
            first, last = part.start, part.start + part.size
        elif isinstance(part, slice) and part.step is None:
            first = 0 if part.start is None else part.start
            last = size if part.stop is None else part.stop
        else:
            raise ViolationError(f"an index of this kind is not known: {part!r}")
        if not 0 <= first < last <= size:
            raise ViolationError(f"{first}:{last} is out of axis {axis} of {self.shape}")
        return first if isinstance(part, (int, np.integer)) else slice(first, last)

    def read(self) -> NDArray[np.float32]:
        self.storage.touch(self.ids, write=False)
        return self.values.astype(np.float32)

    def write(self, values: NDArray[Any], *, accumulate: bool = False) -> None:
        if self.storage.readonly:
            raise ViolationError("an input cannot be written")
        if values.shape != self.shape:
            raise ViolationError(f"{values.shape} does not fit into {self.shape}")
        self.storage.touch(self.ids, write=True, accumulate=accumulate)
        self.values[...] = values


def allocate(shape: tuple[int, ...], dtype: Any, buffer: str) -> Tensor:
    """Make a tensor of NaN. Raises ViolationError if the buffer cannot hold it."""
    if any(size < 1 for size in shape):
        raise ViolationError(f"a shape of {shape}")
    row = int(np.prod(shape[1:])) * np.dtype(dtype).itemsize
    if buffer in ("sbuf", "psum"):
        if len(shape) < 2 or shape[0] > PARTITIONS:
            raise ViolationError(f"a tile of {shape}: it may have {PARTITIONS} partitions")
        if buffer == "psum" and row > BANK_BYTES:
            raise ViolationError(f"a tile of {shape}: a bank of PSUM has {BANK_BYTES} bytes")
        if buffer == "psum" and np.dtype(dtype) != np.float32:
            raise ViolationError("PSUM accumulates in float32")
    return hold(np.full(shape, np.nan, dtype), buffer, readonly=False)


def hold(values: NDArray[Any], buffer: str, *, readonly: bool) -> Tensor:
    storage = Storage(values, buffer, readonly)
    return Tensor(storage, values, np.arange(values.size).reshape(values.shape))
