"""All differences between the versions of torch in the images (2.2 to 2.13)."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint

try:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
except ImportError:  # torch < 2.5
    from torch.distributed._tensor import (  # type: ignore[no-redef,attr-defined]
        DTensor,
        Replicate,  # noqa: F401
        Shard,  # noqa: F401
    )
    from torch.distributed._tensor.placement_types import (  # type: ignore
        _Partial as Partial,  # noqa: F401
    )


@functools.lru_cache
def fsdp2() -> Any:
    """Return the module with `fully_shard` and `MixedPrecisionPolicy`, or None if torch has none.

    It is public since torch 2.6. Torch 2.4 and 2.5 have it in a private place, and it works only
    with CUDA's streams there; earlier ones have only FSDP1.
    """
    private = ["torch.distributed._composable.fsdp"] if torch.cuda.is_available() else []
    for name in ("torch.distributed.fsdp", *private):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        # torch 2.2 has another `fully_shard`, and no policy of this name.
        if hasattr(module, "fully_shard") and hasattr(module, "MixedPrecisionPolicy"):
            return module
    return None


def host_copier(device: torch.device) -> Callable[[Any], Any] | None:
    """Return a function that copies a state into host memory, which it keeps for the next copy.

    From a GPU it copies into pinned memory, all at once. None before torch 2.9. (The public
    DefaultStager does the same in 2.13; that of 2.11 can be used only once.)
    """
    try:
        from torch.distributed.checkpoint._state_dict_stager import StateDictStager
    except ImportError:
        return None
    on_gpu = device.type == "cuda"
    stager = StateDictStager(pin_memory=on_gpu, share_memory=False)

    def copy(state: Any) -> Any:
        copied = stager.stage(state, non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize(device)
        return copied

    return copy


def saves_boxes() -> bool:
    """Return whether checkpoints ask a tensor for its boxes, as they do since torch 2.5."""
    return importlib.util.find_spec("torch.distributed._checkpointable") is not None


def selective_contexts() -> Any:
    """Return the function for the contexts of selective recomputation; None before torch 2.4."""
    return getattr(torch.utils.checkpoint, "create_selective_checkpoint_contexts", None)


def fuses_adamw(device_type: str) -> bool:
    """Return whether AdamW has a fused kernel for this device: on a CPU since torch 2.4."""
    return device_type == "cuda" or (device_type == "cpu" and torch.__version__ >= "2.4")


if torch.__version__ < "2.3":
    # For debugging, torch 2.2 logs times and a table of the GPU's memory at every save, when it
    # collects FSDP1's optimizer state, and waits for the GPU. Without a GPU both are errors.
    for place in ("_optim_utils", "_debug_utils"):
        logging.getLogger(f"torch.distributed.fsdp.{place}").setLevel(logging.ERROR)
    if not torch.cuda.is_available():
        torch.cuda.memory_summary = lambda *args, **kwargs: ""
        torch.cuda.synchronize = lambda *args, **kwargs: None

    # To collect FSDP1's parameters it asks each for its part on this rank. Of parameters with fewer
    # rows than there are ranks, this rank may have none.
    from torch.distributed._shard.sharded_tensor import custom_sharded_op_impl

    @custom_sharded_op_impl(torch.Tensor.is_meta.__get__)  # type: ignore[attr-defined]
    def _is_meta(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> bool:
        return any(shard.tensor.is_meta for shard in args[0].local_shards())


def reduce_scatter(own: torch.Tensor, all_: torch.Tensor, group: Any) -> None:
    """Sum `all_` (n * rows, ...) over the n ranks, and keep this rank's rows, (rows, ...)."""
    since_2_13 = getattr(dist, "reduce_scatter_single", None)
    (since_2_13 or dist.reduce_scatter_tensor)(own, all_, group=group)


def all_gather(all_: torch.Tensor, own: torch.Tensor, group: Any) -> None:
    """Put the rows (rows, ...) of all n ranks into `all_`, (n * rows, ...)."""
    since_2_13 = getattr(dist, "all_gather_single", None)
    (since_2_13 or dist.all_gather_into_tensor)(all_, own, group=group)


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of calls of an existing process group.

    Torch 2.2 has no function for it, and later ones skip wrapped groups, which all are under
    TORCH_DISTRIBUTED_DEBUG=DETAIL.
    """
    for device in group._device_types:
        backend = group._get_backend(device)
        getattr(backend, "wrapped_pg", backend).options._timeout = timeout


def full_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor that may be sharded (a collective call if it is)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
