"""Check that the compiled kernels train: a few steps of mamba-ssm's Mamba-1 and Mamba-2.

mamba-ssm has no Mamba-2 before version 2.

    python3 -m training.smoke.kernels [--device cuda]

Each block learns one random sequence by heart, which is possible as its last projection has more
parameters than the sequence has values. Prints the first and last loss of each block as JSON. If a
loss does not fall to half, the exit code is 1 and standard error names the block.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from training.cli import HelpFormatter

LENGTH, WIDTH = 64, 64
STEPS = 100
RATIO = 0.5


def blocks(library: ModuleType) -> list[str]:
    """Name the blocks that this version must have."""
    return ["Mamba", *(["Mamba2"] if int(library.__version__.split(".")[0]) >= 2 else [])]


def train(kind: Callable[..., Any], device: str) -> tuple[float, float]:
    """Train one block of mamba-ssm in bf16 by autocast; return the first and last loss."""
    import torch
    from torch.nn import functional as F

    torch.manual_seed(0)
    block = kind(d_model=WIDTH).to(device)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    x, wanted = torch.randn(2, 1, LENGTH, WIDTH, device=device)  # each (batch, length, width)
    losses = []
    for _ in range(STEPS):
        with torch.autocast(device, torch.bfloat16):
            y = block(x)  # (batch, length, width)
        loss = F.mse_loss(y.float(), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m training.smoke.kernels",
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device", metavar="NAME", default="cuda", help="where to train (default: cuda)"
    )
    device = parser.parse_args(arguments).device
    library = importlib.import_module("mamba_ssm")
    losses = {name: train(getattr(library, name), device) for name in blocks(library)}
    print(json.dumps(losses))
    faults = [
        f"{name}: loss {first:.4g} -> {last:.4g}, must fall to half"
        for name, (first, last) in losses.items()
        if not last < RATIO * first
    ]
    if faults:  # printed last, after warnings of libraries
        print("; ".join(faults), file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
