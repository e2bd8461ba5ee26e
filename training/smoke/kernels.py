"""Do the compiled kernels train? Mamba-1 and Mamba-2 of mamba-ssm, each a few steps on a device.

    python3 -m training.smoke.kernels [--device cuda]

One block learns one random sequence by heart: its last projection has more parameters than there
are values, so that it can. Prints first and last loss of each as JSON; exit code 1 where one does
not fall to half.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys

from training.cli import HelpFormatter

BLOCKS = ("Mamba", "Mamba2")
LENGTH, WIDTH = 64, 64
STEPS = 100
RATIO = 0.5


def train(name: str, device: str) -> tuple[float, float]:
    """Train one block of mamba-ssm in bf16 by autocast; first and last loss."""
    import torch
    from torch.nn import functional as F

    torch.manual_seed(0)
    block = getattr(importlib.import_module("mamba_ssm"), name)(d_model=WIDTH).to(device)
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
    losses = {name: train(name, device) for name in BLOCKS}
    print(json.dumps(losses))
    return 0 if all(last < RATIO * first for first, last in losses.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
