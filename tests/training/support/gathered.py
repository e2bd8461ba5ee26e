"""How much of a block's weights each of two ranks holds at some moments; run by test_memory.

    torchrun --nproc_per_node=2 -m tests.training.support.gathered FILE

Writes FILE: engine -> settings -> [how many gathers have begun when the first block computes, the
share of its weights that the rank has after the model's forward pass, and after the backward pass].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.training.support.runs import ENGINES
from training import compat, models
from training.config.config import ParallelConfig
from training.entrypoint import leave
from training.models import preset
from training.parallel import fsdp
from training.process_group import Group, start, stop

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "ahead": {"forward_prefetch": True},
}


def held(block: nn.Module) -> int:
    """Count the elements of a block's parameters that this rank holds at the moment."""
    locals_ = [
        one.to_local() if isinstance(one, compat.DTensor) else one for one in block.parameters()
    ]
    return sum(one.numel() for one in locals_)


def watched(config: ParallelConfig, group: Group) -> list[float]:
    """Observe the second step of one case; the first one determines the order of the blocks."""
    whole = sum(one.numel() for one in models.build(SIZES).blocks[0].parameters())
    model: Any = fsdp.build(SIZES, config, group, seed=1)
    first = next(iter(model.model.layers))
    inner = first.module if hasattr(first, "module") else first
    tokens = torch.zeros(1, 8, dtype=torch.long)  # (b, l)
    model(tokens, tokens).backward()
    found: list[float] = []
    begun.clear()
    inner.input_layernorm.register_forward_pre_hook(lambda *given: found.append(len(begun)))
    loss = model(tokens, tokens)  # ()
    found.append(held(first) / whole)
    loss.backward()
    found.append(held(first) / whole)
    return found


def noted(gather: Callable[..., Any]) -> Callable[..., Any]:
    def begin(*given: Any, **named: Any) -> Any:
        begun.append(1)
        return gather(*given, **named)

    return begin


begun: list[int] = []
SIZES = preset("llama-tiny")


def main(file: Path) -> None:
    group = start("cpu")
    for name in ("all_gather", "all_gather_into_tensor", "all_gather_single"):
        if hasattr(dist, name):  # the last one is FSDP2's, in torch 2.13
            setattr(dist, name, noted(getattr(dist, name)))
    found = {
        engine: {
            name: watched(ParallelConfig(fsdp_engine=engine, **settings), group)
            for name, settings in CASES.items()
        }
        for engine in ENGINES
    }
    if group.rank == 0:
        file.write_text(json.dumps(found))
    group.barrier()
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave(0)
