"""A strict NumPy model of what NKI's documents say about the calls that the kernels make.

It stands in for the module `nki` if neither that nor `neuronxcc` is installed. It raises on calls
and arguments that it does not know. It does not model time, engines or instruction order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from tests.training.ops.nki.model import isa, language
from tests.training.ops.nki.model.memory import Tensor, ViolationError, hold, start, stop

__all__ = ["ViolationError", "jit", "modules", "simulate"]


@dataclass(frozen=True)
class Kernel:
    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        raise ViolationError("there is no device here; use nki.simulate")


def jit(function: Callable[..., Any]) -> Kernel:
    return Kernel(function)


def simulate(kernel: Kernel, seed: int = 0) -> Callable[..., Any]:
    """Return the kernel as a function of numpy arrays; `seed` orders its parallel loops."""

    def run(*arguments: Any) -> Any:
        start(seed)
        try:
            given = [
                hold(one, "hbm", readonly=True) if isinstance(one, np.ndarray) else one
                for one in arguments
            ]
            found = kernel.function(*given)
        finally:
            stop()
        return tuple(map(_output, found)) if isinstance(found, tuple) else _output(found)

    return run


def _output(found: Tensor) -> Any:
    if found.buffer != "shared_hbm":
        raise ViolationError(f"a kernel returns tensors in shared_hbm, not in {found.buffer}")
    return found.values


def modules() -> dict[str, ModuleType]:
    """Return the modules that stand in for `nki`."""
    found = {}
    for name, origin in (
        ("nki", sys.modules[__name__]),
        ("nki.isa", isa),
        ("nki.language", language),
    ):
        found[name] = ModuleType(name)
        public = {key: value for key, value in vars(origin).items() if not key.startswith("_")}
        found[name].__dict__.update(public, __path__=[])
    found["nki"].__dict__.update(isa=found["nki.isa"], language=found["nki.language"])
    return found
