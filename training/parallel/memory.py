"""Trade-offs between memory and speed: engine, precision, and what blocks recompute.

A recomputed block keeps only its input (full), or also the results of its matrix products and of
attention (selective), which take most of a block's time. The scans of Mamba, norms and activations
are recomputed either way; so is attention if it is not a single torch operation (with a window or a
mask on a CPU).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from training import compat
from training.config.config import Config, ParallelConfig
from training.errors import RequestError
from training.models.language import Block

_KEPT = (
    "aten.mm.",
    "aten.addmm.",
    "aten._grouped_mm.",
    "aten._scaled_mm.",
    "aten._scaled_dot_product_",
    "flash_attn._flash_attn_forward.",
    "flash_attn._flash_attn_varlen_forward.",
)
"""Prefixes of the names of operations whose results are kept. Batched matrix products are not
among them: in a block they are parts of a scan, of attention with a window or the like."""


def uses_fsdp2(engine: str) -> bool:
    """Return whether to use FSDP2. Raises RequestError if it is asked for and torch has none."""
    if engine == "fsdp2" and compat.fsdp2() is None:
        raise RequestError(f"fsdp_engine: torch {torch.__version__} has no FSDP2; fix: use auto")
    return engine != "fsdp1" and compat.fsdp2() is not None


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Choose bfloat16 or float32; auto is bfloat16 on a GPU that has it."""
    has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported()
    if precision == "bf16" and not has_bf16:
        raise RequestError("precision: this GPU has no bfloat16; fix: use precision=fp32")
    wanted = precision == "bf16" or (precision == "auto" and device.type == "cuda" and has_bf16)
    return torch.bfloat16 if wanted else torch.float32


def check_tradeoffs(config: Config, device: torch.device) -> None:
    """Raise RequestError with all faults that need torch or the device to find."""
    parallel = config.parallel
    fsdp2 = uses_fsdp2(parallel.fsdp_engine)
    found = []
    if parallel.checkpointing_policy == "selective" and compat.selective_contexts() is None:
        found.append(
            f"checkpointing_policy: selective needs torch 2.4 or later, but this is "
            f"{torch.__version__}; fix: use full"
        )
    if fsdp2 and not parallel.limit_all_gathers:
        found.append(
            "limit_all_gathers: FSDP2 always limits them; fix: use fsdp_engine=fsdp1 for False"
        )
    if fsdp2 and parallel.backward_prefetch == "post":
        found.append(
            "backward_prefetch: FSDP2 always gathers before a block's gradients; fix: use pre, or "
            "fsdp_engine=fsdp1"
        )
    narrow = compute_dtype(parallel.precision, device) == torch.bfloat16
    if parallel.reduce_precision == "bf16" and not narrow:
        found.append(
            f"reduce_precision: bf16 would round the gradients of float32 "
            f"(precision={parallel.precision} on {device.type}); fix: use auto or fp32"
        )
    if device.type == "cpu":
        found += [
            f"{name}: on a CPU everything is in the host's memory already; fix: leave it out"
            for name in ("offload_activations", "cpu_offload")
            if getattr(parallel, name)
        ]
    horizon, blocks = parallel.activation_loading_horizon, config.model.sizes.n_layer
    if parallel.offload_activations and horizon >= blocks:
        found.append(
            f"activation_loading_horizon: {horizon} blocks ahead are all that a model of {blocks} "
            "has, so nothing would be offloaded; fix: use less, or leave out offload_activations"
        )
    if parallel.cpu_offload and not fsdp2 and config.data.gradient_accumulation > 1:
        found.append(
            "cpu_offload: FSDP1 does not add up gradients that are in the host's memory; fix: use "
            "gradient_accumulation=1, or FSDP2"
        )
    if found:
        raise RequestError.of(found)


def mark_recomputed(blocks: Sequence[Block], config: ParallelConfig) -> None:
    """Mark every N-th block for recomputation, as the settings ask."""
    if not config.fsdp_activation_checkpointing:
        return
    for block in blocks[:: config.selective_checkpointing]:
        block.recompute = True
        if config.checkpointing_policy == "selective":
            # New contexts for each call, as they hold what is kept.
            block.kept = functools.partial(compat.selective_contexts(), _policy)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
    """Return whether the result of an operation is kept."""
    return _is_kept(operation)


@functools.cache
def _is_kept(operation: Any) -> bool:
    return str(operation).startswith(_KEPT)
