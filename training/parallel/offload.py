"""What the backward pass needs of each block, kept in another memory and brought back in time.

While a block computes, every storage that autograd saves of it is sent out, once, whatever views of
it are saved; it is let go here when the block after it is done, so that the copy runs beside the
work. In the backward pass, the first tensor that a block is asked for begins to bring back what the
next `horizon` blocks need.

What stays: parameters (sharding looks after them), what all blocks are given, small tensors, and
all of the last `horizon` blocks, which would come back at once. A block that is recomputed saves
its input only, so only that is sent.
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
"""Bytes of a storage that is worth a copy."""

Wait = Callable[[], None]
"""Makes the work that follows wait for the copies that had begun when it was made."""


class Memory(Protocol):
    """Another memory than the device's; copies out and back run beside the work."""

    device: torch.device

    def send(self, here: Tensor) -> Tensor:
        """Begin to copy a tensor out; it must be kept until `sent` has been waited for."""

    def sent(self) -> Wait: ...

    def fetch(self, there: Tensor) -> Tensor:
        """Begin to copy a tensor back; it is there when `fetched` has been waited for."""

    def fetched(self) -> Wait: ...


class HostMemory:
    """The host's memory, page-locked, over a stream of its own for each way."""

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
        # Made, and later let go, by the stream that computes: so what it held before is done with.
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
    """A storage that was sent: its bytes there, and here while they are needed."""

    there: Tensor  # (bytes,)
    views: int = 0  # saved tensors that are views of it
    here: Tensor | None = None  # (bytes,)
    given: int = 0  # of its views, since it is here


@dataclass
class _Saved:
    """What one block saved; `before` is that of the block before it, needed next."""

    memory: Memory
    horizon: int
    before: _Saved | None
    copies: dict[tuple[int, int], _Copy] = field(default_factory=dict)
    leaving: list[Tensor] = field(default_factory=list)
    left: Wait | None = None
    arrived: Wait | None = None

    def send(self, tensor: Tensor) -> _Copy:
        """Send a tensor's storage, unless it was; in-place work on it makes it another."""
        key = tensor.untyped_storage().data_ptr(), tensor._version
        if key not in self.copies:
            here = _bytes_of(tensor)  # (bytes,)
            self.leaving.append(here)  # until it is let go no other storage has its address
            self.copies[key] = _Copy(self.memory.send(here))
        self.copies[key].views += 1
        return self.copies[key]

    def end(self) -> None:
        """Note that the block is done: what follows on the way out is not its own."""
        if self.leaving:
            self.left = self.memory.sent()

    def let_go(self) -> None:
        """Let the storages go here, when they are there."""
        if self.left is not None:
            self.left()
            self.leaving.clear()

    def fetch(self) -> None:
        """Begin to bring everything back, unless that has begun."""
        if self.arrived is None and self.copies:
            for copy in self.copies.values():
                copy.here = self.memory.fetch(copy.there)  # (bytes,)
            self.arrived = self.memory.fetched()

    def look_ahead(self) -> None:
        """Begin to bring back what this block needs, and those that come next."""
        one: _Saved | None = self
        for _ in range(self.horizon + 1):
            if one is None:
                return
            one.fetch()
            one = one.before

    def give(self, copy: _Copy) -> Tensor:
        """Give a copy that is here, (bytes,); it is let go when all its views have been given."""
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
    """A saved tensor that stayed."""

    saved: _Saved
    tensor: Tensor

    def take(self) -> Tensor:
        self.saved.look_ahead()
        return self.tensor


@dataclass(frozen=True)
class _Sent:
    """A saved tensor whose storage was sent: where in it, and as what, it lies."""

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
    """Looks after the blocks of one model."""

    def __init__(self, memory: Memory, horizon: int, least: int = LEAST) -> None:
        self.memory, self.horizon, self.least = memory, horizon, least
        self._newest: _Saved | None = None

    def attach(self, blocks: Sequence[Block]) -> None:
        """Let the blocks of a model, in their order, keep what they save in the other memory."""
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
    """Tell where the storage lies of a tensor, or of this rank's part of it."""
    local = tensor.to_local() if isinstance(tensor, compat.DTensor) else tensor
    return local.untyped_storage().data_ptr()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Give the whole storage of a tensor, uint8 (bytes,)."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)  # (0,)
    return empty.set_(tensor.untyped_storage())  # (bytes,)
