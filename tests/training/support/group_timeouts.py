"""A run that prints the timeouts of all of its process groups at its end.

usage: torchrun ... -m tests.training.support.group_timeouts --config FILE [key=value ...]

Prints `timeouts: [seconds, ...]` on every rank, including WORLD's.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from training.__main__ import configure
from training.entrypoint import enter, leave

_destroy = dist.destroy_process_group


def show() -> None:
    groups = dist.distributed_c10d._world.pg_map
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    seconds = [backend.options._timeout.total_seconds() for backend in backends]
    sys.stdout.write(f"timeouts: {seconds}\n")  # in one piece, as other ranks print too
    sys.stdout.flush()
    _destroy()


if __name__ == "__main__":
    dist.destroy_process_group = show  # type: ignore[assignment]
    leave(enter(configure, sys.argv[1:]))
