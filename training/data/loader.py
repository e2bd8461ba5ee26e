"""Read batches ahead, by a thread or by processes, while the model computes.

The order is the feed's own, whoever reads and however far ahead: process w of W reads rows w,
w + W, ... of every batch. A checkpoint records what the model has taken, not what was read.

Processes are spawned: forking a process that holds a network card's memory (EFA with huge pages)
fails. They ignore the signals that ask a run to save and stop, and end with their parent.
"""

from __future__ import annotations

import copy
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.cli import leave_with_parent
from training.data.base import BatchPart, DataFeed, Gather, Sample
from training.errors import TrainingError

Arrays = tuple[np.ndarray[Any, np.dtype[Any]] | None, ...]
NOT_FOR_CHILDREN = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}


class Prefetcher:
    """The batches of a feed in order, on the device.

    reopen: opens the same feed in another process. workers: number of processes that read, 0 for a
    thread. prefetch: batches to read ahead of the one that is asked for.
    """

    def __init__(
        self,
        feed: DataFeed,
        reopen: Callable[[], DataFeed],
        *,
        workers: int,
        prefetch: int,
        device: torch.device,
    ) -> None:
        self.feed, self.prefetch, self.device = feed, prefetch, device
        self._reopen, self._workers = reopen, min(workers, feed.batch_size)
        self.notes = [f"dataset_path: {note}" for note in feed.notes]
        if self._workers < workers:
            self.notes.append(
                f"num_workers: {self._workers} of {workers} have something to read, as a rank's "
                f"batch has {feed.batch_size} sequences"
            )
        self._pools: list[Executor] = []
        self._reads: list[Callable[[], Future[Any]]] = []
        self._coming: deque[list[Future[Any]]] = deque()
        self._ready: deque[BatchPart] = deque()
        self._waited = 0.0

    def next_batch(self) -> Sample:
        """Return this rank's next batch, (b, l). Raises TrainingError if it cannot be read."""
        part = self._part(0)
        self._ready.popleft()
        self.feed.took(part)
        if self._coming and all(one.done() and not one.exception() for one in self._coming[0]):
            self._ready.append(self._collected())  # copied to the device while the model computes
        return part.rows

    def ended(self) -> bool:
        """Return whether nothing in this rank's next step counts, all passes being over."""
        return all(self._part(index).spent for index in range(self.feed.accumulation))

    def waited(self) -> float:
        """Return the seconds spent waiting for data since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def state(self, gather: Gather) -> dict[str, Any]:
        """Return how far batches were taken, for a checkpoint (a collective call)."""
        return self.feed.state(gather)

    def resume(self, state: dict[str, Any]) -> str | None:
        """Continue where a checkpoint stood, before anything is read, or return why not."""
        return self.feed.resume(state)

    def close(self) -> None:
        """Stop reading; processes have ended when this returns."""
        self._coming.clear()
        self._reads.clear()
        while self._pools:
            self._pools.pop().shutdown(wait=bool(self._workers), cancel_futures=True)

    def _part(self, index: int) -> BatchPart:
        """Return upcoming batch number `index`, counted from 0, without taking it."""
        since = time.perf_counter()
        if not self._reads:
            self._start()
        while len(self._ready) + len(self._coming) < index + 1 + self.prefetch:
            self._coming.append([read() for read in self._reads])
        while len(self._ready) <= index:
            self._ready.append(self._collected())
        self._waited += time.perf_counter() - since
        return self._ready[index]

    def _start(self) -> None:
        if not self._workers:
            feed, rows = copy.copy(self.feed), range(self.feed.batch_size)
            thread = ThreadPoolExecutor(1, "data")
            self._pools = [thread]
            self._reads = [lambda: thread.submit(feed.next_rows, rows)]
            return
        state = self.feed.state(lambda mine: [mine])
        spawn = multiprocessing.get_context("spawn")
        pools = [ProcessPoolExecutor(1, spawn) for _ in range(self._workers)]
        every = range(self.feed.batch_size)
        with _blocked():
            begun = [
                pool.submit(_begin, self._reopen, state, every[number :: len(pools)])
                for number, pool in enumerate(pools)
            ]
        self._pools = [*pools]
        self._reads = [partial(pool.submit, _next) for pool in pools]
        with _reporting():
            for one in begun:
                one.result()

    def _collected(self) -> BatchPart:
        """Assemble the next batch from what each reader has read of it."""
        with _reporting():
            parts = [one.result() for one in self._coming.popleft()]
        if not self._workers:
            part: BatchPart = parts[0]
            return BatchPart(part.rows.to(self.device), part.lanes, part.spent)
        rows = Sample(*(_woven([sent[0][at] for sent in parts]) for at in range(4)))  # type: ignore[arg-type]
        lanes = {lane: place for _, lanes, _ in parts for lane, place in lanes.items()}
        return BatchPart(rows.to(self.device), lanes, all(spent for *_, spent in parts))


def _woven(parts: list[Any]) -> Tensor | None:
    """Interleave rows (r, l): part w of W becomes rows w, w + W, ... of (b, l)."""
    if parts[0] is None:
        return None
    whole = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)  # (b, l)
    for number, part in enumerate(parts):
        whole[number :: len(parts)] = part
    return torch.from_numpy(whole)  # (b, l)


@contextmanager
def _reporting() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise TrainingError(
            "a process of num_workers was killed, likely for lack of memory; fix: start again, "
            "with fewer or with num_workers=0, to go on from the last checkpoint",
            local=True,
        ) from error


@contextmanager
def _blocked() -> Iterator[None]:
    """Block NOT_FOR_CHILDREN meanwhile, so that processes started here never receive them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_CHILDREN)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_feed: DataFeed
_rows: range


def _begin(reopen: Callable[[], DataFeed], state: dict[str, Any], rows: range) -> None:
    """Open the feed in this process, which reads these rows from `state` on."""
    global _feed, _rows
    leave_with_parent()
    torch.set_num_threads(1)
    _feed, _rows = reopen(), rows
    if _feed.fingerprint != state["fingerprint"]:
        raise TrainingError("dataset_path: the data changed while the run started", local=True)
    _feed.resume(state)


def _next() -> tuple[Arrays, dict[int, tuple[int, ...]], bool]:
    """Read the next rows, as arrays: tensors would use /dev/shm, which is small in containers."""
    part = _feed.next_rows(_rows)
    rows = (part.rows.inputs, part.rows.targets, part.rows.weights, part.rows.seq_idx)
    arrays = tuple(None if one is None else one.numpy() for one in rows)
    return arrays, part.lanes, part.spent
