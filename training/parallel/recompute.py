"""Which blocks are computed again in the backward pass, and what such a block keeps.

Its input only (full), or also the results of its matrix products and of attention (selective):
these take most of a block's time. The scans of Mamba, norms and activations are computed again
either way; so is attention where it is not one operation of torch (a window or a mask on a CPU).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from training import compat
from training.config.config import ParallelConfig
from training.models.language import Block

_KEPT = (
    "aten.mm.",
    "aten.addmm.",
    "aten._grouped_mm.",
    "aten._scaled_dot_product_",
    "flash_attn._flash_attn_forward.",
)
"""How the names of operations begin whose results are kept. Products of batches of matrices are
not among them: in a block they are parts of a scan, a window's attention or the like."""


def mark(blocks: Sequence[Block], config: ParallelConfig) -> None:
    """Let every N-th block be recomputed, as the settings ask for."""
    if not config.fsdp_activation_checkpointing:
        return
    for block in blocks[:: config.selective_checkpointing]:
        block.recompute = True
        if config.checkpointing_policy == "selective":
            # Of each call its own: the contexts hold what is kept.
            block.kept = functools.partial(compat.selective_contexts(), _policy)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
    """Tell whether the result of an operation is kept."""
    return _is_kept(operation)


@functools.cache
def _is_kept(operation: Any) -> bool:
    return str(operation).startswith(_KEPT)
