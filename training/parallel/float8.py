"""Float8 matrix products in the linear layers of the blocks, with the library torchao.

Where they are unavailable the run continues without them and logs a line: whoever writes a job
rarely knows whether its GPUs have them. Each product's scales come from the tensors it multiplies.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable

import torch
from torch import nn

from training import compat
from training.config.config import ParallelConfig

LEAST = (8, 9)
"""Compute capability of the first GPUs that multiply in float8 (Ada; Hopper has 9.0)."""
MULTIPLE = 16
"""Both sizes of a weight must be multiples of this for float8 products."""

log = logging.getLogger("training.parallel.float8")


def convert(
    blocks: Iterable[nn.Module], config: ParallelConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Make the linear layers of the blocks multiply in float8, in place; log what was done."""
    if not config.fp8:
        return
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    has_library = importlib.util.find_spec("torchao") is not None
    why = obstacle(config, dtype, capability, has_library)
    if why:
        log.info("fp8: off, as %s", why)
        return
    from torchao.float8 import convert_to_float8_training

    for block in blocks:
        convert_to_float8_training(block, module_filter_fn=fits)
    log.info("fp8: the linear layers of the blocks multiply in float8 (torchao)")


def obstacle(
    config: ParallelConfig,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    has_library: bool,
) -> str:
    """Return why float8 is unavailable, or an empty string. `capability` is None without a GPU."""
    if capability is None:
        return "this is not a GPU"
    if capability < LEAST:
        return f"this GPU has compute capability {capability[0]}.{capability[1]}, but it needs 8.9"
    if dtype != torch.bfloat16:
        return "the blocks compute in float32, but it needs bfloat16"
    if config.tensor_parallel > 1:
        return f"{config.tensor_parallel} ranks share each layer (tensor_parallel)"
    if config.fsdp_engine == "fsdp1" or compat.fsdp2() is None:
        return "this is FSDP1"
    if not has_library:
        return "the library torchao is not installed"
    return ""


def fits(module: nn.Module, name: str) -> bool:
    """Return whether a module is a linear layer whose sizes allow it."""
    return isinstance(module, nn.Linear) and not (
        module.in_features % MULTIPLE or module.out_features % MULTIPLE
    )
