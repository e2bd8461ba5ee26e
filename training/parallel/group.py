"""The ranks of a run: started by torchrun, or one alone under plain python."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from training.errors import RequestError, TrainingError

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """One process among the others; `control` is a gloo group for decisions made on the CPU."""

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    control: Any  # a gloo process group

    def any(self, flag: bool) -> bool:
        """Tell every rank whether the flag is set on at least one (a collective call)."""
        if self.world_size == 1:
            return flag
        votes = torch.tensor([int(flag)])  # (1,)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.control)
        return bool(votes.item())

    def broadcast(self, value: T) -> T:
        """Give every rank the value of rank 0."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; if it fails for the user on any, every rank raises that.

        So no rank waits for one that has already given up.
        """
        error: TrainingError | None = None
        result: Any = None
        try:
            result = work()
        except TrainingError as failed:
            error = failed
        told: list[Any] = [None] * self.world_size
        mine = None if error is None else (str(error), error.exit_code)
        dist.all_gather_object(told, mine, group=self.control)
        failures = [(rank, *failure) for rank, failure in enumerate(told) if failure is not None]
        if failures:
            rank, message, code = failures[0]
            where = "" if len(failures) == self.world_size else f"rank {rank}: "
            raise (RequestError if code == RequestError.exit_code else TrainingError)(
                where + message
            )
        return result


def start(device: str, cpu_offload: bool = False) -> Group:
    """Join the other ranks: nccl on GPUs, gloo on CPUs. `device` is auto, cpu or cuda.

    With cpu_offload also gloo on GPUs, for gradients that are in the host's memory.
    Raises RequestError if a GPU is asked for and there is none for this rank.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda" and torch.cuda.device_count() <= local_rank:
        raise RequestError(
            f"device: cuda was asked for, and local rank {local_rank} has no GPU "
            f"({torch.cuda.device_count()} visible); start fewer ranks a node, or use device=cpu",
            local=True,
        )
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.device_count() > local_rank)
    where = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(where)
    backend = "gloo"
    if on_gpu:
        backend = "cpu:gloo,cuda:nccl" if cpu_offload else "nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    control = dist.new_group(backend="gloo") if on_gpu else dist.group.WORLD
    return Group(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        device=where,
        control=control,
    )


def stop() -> None:
    """Leave the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
