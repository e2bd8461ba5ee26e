"""The ranks of a run: started by torchrun, or a single one under plain python."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from training.errors import RequestError, TrainingError

T = TypeVar("T")


_ended: list[Any] = []
"""Process groups that are not used any more."""


@dataclass(frozen=True)
class Group:
    """One process among the others; `control` is a gloo group for decisions on the CPU."""

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    control: Any  # a gloo process group
    tensor_parallel: int = 1  # adjacent ranks that share each layer, and read the same data
    context_parallel: int = 1  # adjacent tensor groups that share rows, and read the same data
    timeout: timedelta | None = None  # of collective calls, for groups made later

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.local_world_size)

    @property
    def data_rank(self) -> int:
        return self.rank // (self.tensor_parallel * self.context_parallel)

    @property
    def data_world_size(self) -> int:
        return self.world_size // (self.tensor_parallel * self.context_parallel)

    def any(self, flag: bool) -> bool:
        """Return, on every rank, whether the flag is set on at least one (a collective call)."""
        return self.any_of(flag)[0]

    def any_of(self, *flags: bool) -> list[bool]:
        """Return the same for several flags at once."""
        if self.world_size == 1:
            return list(flags)
        votes = torch.tensor(flags, dtype=torch.int32)  # (flags,)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.control)
        return [bool(vote) for vote in votes.tolist()]

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0 on every rank."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def by_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 alone and return its result, by pickle, on every rank (collective).

        If it raises TrainingError, every rank raises that.
        """
        result: Any = None
        if self.rank == 0:
            try:
                result = work()
            except TrainingError as error:
                error.local = False  # every rank raises it
                result = error
        if self.world_size > 1:
            result = self.broadcast(result)
        if isinstance(result, TrainingError):
            raise result
        return cast(T, result)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order, on every rank (a collective call)."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def together(self, work: Callable[[], T], *, copies: bool = False) -> T:
        """Run `work` on every rank; if it raises TrainingError on any, every rank raises that.

        So no rank waits for one that has already given up. It may take as long as a collective
        call, or LONGEST_COPY if it `copies` data or models to a node.
        """
        error: TrainingError | None = None
        result: Any = None
        try:
            result = work()
        except TrainingError as failed:
            error = failed
        if copies:
            self._meet()
        results = self.gather(None if error is None else (str(error), error.exit_code))
        failures = [(rank, *failure) for rank, failure in enumerate(results) if failure is not None]
        if failures:
            rank, message, code = failures[0]
            where = "" if len(failures) == self.world_size else f"rank {rank}: "
            raise (RequestError if code == RequestError.exit_code else TrainingError)(
                where + message
            )
        return result

    def _meet(self) -> None:
        """Wait until every rank is here: each sends rank 0 a message, which then answers each.

        Messages, unlike collective calls, can each have a time limit of their own. A process that
        ends closes its connections, which ends the others' waiting.
        """
        sign = torch.zeros(1)  # (1,)
        others = list(range(1, self.world_size)) if self.rank == 0 else [0]
        ways: list[Callable[..., Any]] = [dist.isend, dist.irecv]
        for way in reversed(ways) if self.rank == 0 else ways:
            for message in [way(sign, other, group=self.control) for other in others]:
                message.wait(LONGEST_COPY)


LONGEST = 1800
"""Maximum seconds of a collective call: gloo's own default."""
LONGEST_COPY = timedelta(hours=12)
"""How long ranks wait for one that copies what the run starts with, nodes for the final model."""


def start(
    device: str,
    tensor_parallel: int = 1,
    *,
    context_parallel: int = 1,
    cpu_offload: bool = False,
    hang_abort_seconds: int = 0,
) -> Group:
    """Join the other ranks: nccl on GPUs, gloo on CPUs. `device` is auto, cpu or cuda.

    With cpu_offload also gloo on GPUs, for gradients in host memory.
    Raises RequestError if GPUs are asked for, or this machine has some, and this rank has none.
    """
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    on_gpu = device == "cuda" or (device == "auto" and gpus > 0)
    if on_gpu and gpus <= local_rank:
        # On gloo it would never meet the ranks on nccl.
        asked = "cuda was asked for" if device == "cuda" else "auto takes this machine's GPUs"
        raise RequestError(
            f"device: {asked}, but local rank {local_rank} has no GPU ({gpus} visible); "
            "fix: start fewer ranks per node, or use device=cpu",
            local=True,
        )
    where = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(where)
    backend = "gloo"
    if on_gpu:
        backend = "cpu:gloo,cuda:nccl" if cpu_offload else "nccl"
    atexit.unregister(_free_last_tensors)  # once, however often a process starts
    atexit.register(_free_last_tensors)
    timeout = timeout_under(hang_abort_seconds)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    control = dist.new_group(backend="gloo", timeout=timeout) if on_gpu else dist.group.WORLD
    return Group(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        device=where,
        control=control,
        tensor_parallel=tensor_parallel,
        context_parallel=context_parallel,
        timeout=timeout,
    )


def timeout_under(hang_abort_seconds: int) -> timedelta | None:
    """Return the timeout of collective calls; None, for torch's own, without a watch.

    The watch names the rank that hangs before it ends all, so calls may take longer than it waits.
    Nccl, by its own default, would kill the process after the same ten minutes. Groups made later
    do not inherit the timeout.
    """
    return timedelta(seconds=max(LONGEST, 2 * hang_abort_seconds)) if hang_abort_seconds else None


def _free_last_tensors() -> None:
    """Give gloo's threads time to free the tensors of the last collective calls.

    They need the interpreter's lock for that. A thread that asks for it while the interpreter is
    ending is ended too, in the middle of C++ code that must not be: a process that has done all its
    work would die of SIGABRT.
    """
    time.sleep(0.1)


def stop() -> None:
    """Leave the group, if there is one.

    Its parts are kept until the process ends: torch 2.2 frees a gloo group while holding the
    interpreter's lock, and waits for its threads, one of which may wait for that lock.
    """
    if dist.is_initialized():
        _ended.extend(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
