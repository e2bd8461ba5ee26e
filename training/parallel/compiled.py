"""torch.compile of the blocks, inside what shards and recomputes them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable

import torch

from training.errors import RequestError
from training.models.language import Block
from training.ops.dispatch import hide_from_compiler


def compile_blocks(blocks: Iterable[Block]) -> None:
    """Compile each block but for its operations, whose loops over chunks would be unrolled.

    Raises RequestError if there is no C++ compiler, which torch.compile needs on every device.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise RequestError(
            f"use_torch_compile: needs a C++ compiler, and {compiler} is not on PATH; "
            "install g++, name another by CXX, or leave the flag out"
        )
    hide_from_compiler()
    for block in blocks:
        block.inner = torch.compile(block.inner)  # type: ignore[method-assign]
