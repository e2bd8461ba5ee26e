"""Offloading: what the backward pass needs of each block is kept elsewhere and fetched in time.

While a block computes, every storage that autograd saves of it is sent out, once, however many
views of it are saved; it is freed here when the next block is done, so that the copy overlaps with
the work. In the backward pass, the first tensor that a block is asked for starts fetching what it
and the next `horizon` blocks need.

What stays: parameters (sharding handles them), tensors that all blocks are given, small tensors,
and everything of the last `horizon` blocks, which would be fetched at once. A recomputed block
saves only its input, so only that is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from training import compat
from training.models.language import Block
from training.ops.documents import Documents

LEAST = 1 << 20
"""Minimum size in bytes of a storage that is worth a copy."""

Wait = Callable[[], None]
"""Makes subsequent work wait for the copies that had begun when it was made."""


class Memory(Protocol):
    """Memory other than the device's; copies out and back overlap with the work."""

    device: torch.device

    def send(self, here: Tensor) -> Tensor:
        """Start copying a tensor out; it must be kept until `sent` has been waited for."""

    def sent(self) -> Wait: ...

    def fetch(self, there: Tensor) -> Tensor:
        """Start copying a tensor back; it is valid once `fetched` has been waited for."""

    def fetched(self) -> Wait: ...


class HostMemory:
    """Page-locked host memory, with a stream of its own for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def send(self, here: Tensor) -> Tensor:
        there = torch.empty_like(here, device="cpu", pin_memory=True)  # the shape of `here`
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            return there.copy_(here, non_blocking=True)

    def sent(self) -> Wait:
        return functools.partial(self._wait, self._out.record_event())

    def fetch(self, there: Tensor) -> Tensor:
        # Allocated and freed on the compute stream, which is done with what was there before.
        here = torch.empty_like(there, device=self.device)  # the shape of `there`
        self._back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._back):
            return here.copy_(there, non_blocking=True)

    def fetched(self) -> Wait:
        return functools.partial(self._wait, self._back.record_event())

    def _wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)


@dataclass
class _Copy:
    """A storage that was sent: its bytes there, and its bytes here while they are needed."""

    there: Tensor  # (bytes,)
    views: int = 0  # saved tensors that are views of it
    here: Tensor | None = None  # (bytes,)
    given: int = 0  # of its views, since it was fetched


@dataclass
class _Saved:
    """What one block saved; `before` is that of the block before it, which is needed next."""

    memory: Memory
    horizon: int
    before: _Saved | None
    copies: dict[tuple[int, int], _Copy] = field(default_factory=dict)
    leaving: list[Tensor] = field(default_factory=list)
    left: Wait | None = None
    arrived: Wait | None = None

    def send(self, tensor: Tensor) -> _Copy:
        """Send a tensor's storage, unless it was; in-place changes make it another."""
        key = tensor.untyped_storage().data_ptr(), tensor._version
        if key not in self.copies:
            here = _bytes_of(tensor)  # (bytes,)
            self.leaving.append(here)  # until freed, no other storage gets its address
            self.copies[key] = _Copy(self.memory.send(here))
        self.copies[key].views += 1
        return self.copies[key]

    def end(self) -> None:
        """Note that the block is done: copies sent from now on are not its own."""
        if self.leaving:
            self.left = self.memory.sent()

    def let_go(self) -> None:
        """Free the storages here, once they have been copied out."""
        if self.left is not None:
            self.left()
            self.leaving.clear()

    def fetch(self) -> None:
        """Start fetching everything, unless that has begun."""
        if self.arrived is None and self.copies:
            for copy in self.copies.values():
                copy.here = self.memory.fetch(copy.there)  # (bytes,)
            self.arrived = self.memory.fetched()

    def look_ahead(self) -> None:
        """Start fetching what this block needs, and what the next ones need."""
        one: _Saved | None = self
        for _ in range(self.horizon + 1):
            if one is None:
                return
            one.fetch()
            one = one.before

    def give(self, copy: _Copy) -> Tensor:
        """Return a fetched copy, (bytes,); it is freed when all its views have been returned."""
        if self.arrived is None or copy.here is None:  # a second backward pass
            self.arrived = None
            self.fetch()
        assert self.arrived is not None and copy.here is not None
        self.arrived()
        here = copy.here  # (bytes,)
        copy.given += 1
        if copy.given == copy.views:
            copy.here, copy.given = None, 0
        return here


@dataclass(frozen=True)
class _Stayed:
    """A saved tensor that was not sent."""

    saved: _Saved
    tensor: Tensor

    def take(self) -> Tensor:
        self.saved.look_ahead()
        return self.tensor


@dataclass(frozen=True)
class _Sent:
    """A saved tensor whose storage was sent: its dtype, and its place in the storage."""

    saved: _Saved
    copy: _Copy
    dtype: torch.dtype
    place: tuple[Any, ...]  # offset, sizes, strides

    def take(self) -> Tensor:
        self.saved.look_ahead()
        storage = self.saved.give(self.copy).untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)  # (0,)
        return empty.set_(storage, *self.place)  # the sizes of the saved tensor


class Offload:
    """Offloads what the blocks of one model save."""

    def __init__(self, memory: Memory, horizon: int, least: int = LEAST) -> None:
        self.memory, self.horizon, self.least = memory, horizon, least
        self._newest: _Saved | None = None

    def attach(self, blocks: Sequence[Block]) -> None:
        """Make the blocks of a model, given in order, keep what they save in the other memory."""
        for index, block in enumerate(blocks):
            last = index + 1 == len(blocks)
            stays = index + self.horizon >= len(blocks)
            block.saving = functools.partial(self._saving, index == 0, stays, last)

    @contextmanager
    def _saving(
        self, first: bool, stays: bool, last: bool, block: Block, context: tuple[Any, ...]
    ) -> Iterator[None]:
        before = None if first else self._newest
        saved = _Saved(self.memory, self.horizon, before)
        shared = [one for one in context if isinstance(one, Tensor)]
        documents = [one for one in context if isinstance(one, Documents)]
        fixed = {_address(one) for one in (*block.parameters(), *shared)}

        def pack(tensor: Tensor) -> _Stayed | _Sent:
            is_shared = _address(tensor) in fixed or any(one.holds(tensor) for one in documents)
            if stays or not self._moves(tensor) or is_shared:
                return _Stayed(saved, tensor)
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            return _Sent(saved, saved.send(tensor), tensor.dtype, place)

        with saved_tensors_hooks(pack, lambda packed: packed.take()):
            yield
        saved.end()
        if before is not None:
            before.let_go()
        self._newest = None if last else saved

    def _moves(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.device == self.memory.device
            and tensor.untyped_storage().nbytes() >= self.least
        )


def _address(tensor: Tensor) -> int:
    """Return the address of the storage of a tensor, or of this rank's part of it."""
    local = tensor.to_local() if isinstance(tensor, compat.DTensor) else tensor
    return local.untyped_storage().data_ptr()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor, as uint8 (bytes,)."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)  # (0,)
    return empty.set_(tensor.untyped_storage())  # (bytes,)
