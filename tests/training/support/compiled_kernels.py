"""Compile the Triton kernels of the selective scan for a GPU that is not present.

usage: python -m tests.training.support.compiled_kernels ARCHITECTURE, such as 90

All tensors are on the meta device, and each launch only compiles. Prints the resources of each
kernel's code as JSON: {kernel: {"shared": bytes, "warps": number, "code": bytes}}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from training.ops.gpu import scan

LAUNCH = JITFunction.run


class Absent:
    """What Triton asks of a GPU's driver before it compiles."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    found: dict[str, dict[str, int]] = {}

    def compiled(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = LAUNCH(kernel, *arguments, grid=grid, warmup=True, **options)
        found[kernel.fn.__name__] = {
            "shared": made.metadata.shared,
            "warps": made.metadata.num_warps,
            "code": len(made.asm["cubin"]),
        }
        return made

    driver.set_active(Absent(int(sys.argv[1])))
    JITFunction.run = compiled
    b, l, d, n = 2, 4096, 5120, 16  # noqa: E741

    def narrow(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)

    def wide(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta", requires_grad=True)

    x, dt, z = narrow(b, l, d), narrow(b, l, d), narrow(b, l, 2 * d)[..., d:]  # (b, l, d) all
    B, C = narrow(b, l, 160 + 2 * n)[..., 160:].chunk(2, dim=-1)  # noqa: N806 - (b, l, n) both
    y = scan.Scan.apply(x, dt, wide(d, n), B, C, wide(d), z, wide(d), None)  # (b, l, d)
    y.backward(torch.empty_like(y))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
