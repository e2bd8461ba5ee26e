"""Names the parts of the steps for Nsight Systems (nsys), and tells it when to record.

    nsys profile --capture-range=cudaProfilerApi --trace=cuda,nvtx python -m training.mamba_fsdp ...

records from the fourth step of a start to its end, so allocations and compilation are not in it.
"""

from __future__ import annotations

from typing import Any

import torch

from training.errors import RequestError
from training.observers.phases import Observer

FIRST = 4
"""The step of a start that is recorded first."""


class Nsight(Observer):
    """Opens a range of NVTX a part. `nvtx` and `recorder` are torch.cuda's; tests have others."""

    def __init__(self, nvtx: Any = torch.cuda.nvtx, recorder: Any = torch.cuda.profiler) -> None:
        self._nvtx, self._recorder = nvtx, recorder
        self._steps = 0

    def __exit__(self, *error: Any) -> None:
        if self._steps >= FIRST:
            self._recorder.stop()

    def begin(self, phase: str) -> None:
        if phase == "step":
            self._steps += 1
            if self._steps == FIRST:
                self._recorder.start()
        self._nvtx.range_push(phase)

    def end(self, phase: str) -> None:
        self._nvtx.range_pop()


def require_gpu(device: torch.device) -> None:
    """Raise RequestError where nsys would have nothing to record."""
    if device.type != "cuda":
        raise RequestError("use_nsight: needs a GPU; use_profiler traces steps on a CPU too")
