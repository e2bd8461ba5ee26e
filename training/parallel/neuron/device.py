"""Joining the other ranks: through torch-xla on Neuron devices, else as in any other run."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
import torch.distributed as dist

from training import process_group
from training.errors import RequestError
from training.parallel.neuron import nxd
from training.parallel.share import Share
from training.process_group import Group


def start(device: str, tensor_parallel: int, hang_abort_seconds: int) -> Group:
    """Join the other ranks; `device` is auto, cpu, cuda or xla, and auto never means xla.

    Raises RequestError if torch-xla, or its device, is missing.
    """
    if device != "xla":
        return process_group.start(device, tensor_parallel, hang_abort_seconds=hang_abort_seconds)
    xla = _xla()
    timeout = process_group.timeout_under(hang_abort_seconds)
    if "RANK" in os.environ:
        dist.init_process_group("xla", timeout=timeout)
    else:
        dist.init_process_group("xla", store=dist.HashStore(), rank=0, world_size=1)
    return Group(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        device=xla.xla_device(),
        control=dist.new_group(backend="gloo", timeout=timeout),
        tensor_parallel=tensor_parallel,
        timeout=timeout,
    )


def uses_nxd(joined: Group) -> bool:
    """Return whether layers and groups are neuronx_distributed's."""
    return joined.device.type == "xla" and nxd.is_there()


def shares(joined: Group) -> tuple[Share, Share]:
    """Return this rank's tensor group, and the group of ranks that read data in parallel to it."""
    if uses_nxd(joined):
        return nxd.shares(joined.tensor_parallel)
    n = joined.tensor_parallel
    ranks = range(joined.world_size)
    tensor = [list(ranks[first : first + n]) for first in ranks[::n]]
    data = [list(ranks[place::n]) for place in range(n)]
    return _share(tensor, joined), _share(data, joined)


def mark_step() -> None:
    """Make XLA compute what has been requested so far."""
    importlib.import_module("torch_xla.core.xla_model").mark_step()


def _share(groups: list[list[int]], joined: Group) -> Share:
    """Create all groups, as every rank must, and return this rank's."""
    made = [(ranks, dist.new_group(ranks, timeout=joined.timeout)) for ranks in groups]
    ranks, own = next((ranks, one) for ranks, one in made if joined.rank in ranks)
    return Share(ranks.index(joined.rank), len(ranks), own)


def _xla() -> Any:
    try:
        importlib.import_module("torch_xla.distributed.xla_backend")
        xla = importlib.import_module("torch_xla.core.xla_model")
        xla.xla_device()
    except Exception as error:  # its libraries fail in many ways without a device
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RequestError(
            f"device: xla is not available here: {first}; it needs torch-xla and a Neuron device "
            f"(the target neuron-mamba2 on a trn instance); fix: on a CPU use gloo, on GPUs nccl "
            f"(torch {torch.__version__})"
        ) from error
    return xla
