"""nki.language, as far as the kernels use it. Signatures are the documented ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.training.ops.nki.model.memory import Loop, Slice, Tensor, ViolationError, allocate, core

float32 = np.dtype(np.float32)
sbuf, psum, hbm, shared_hbm = "sbuf", "psum", "hbm", "shared_hbm"
ds = Slice


@dataclass(frozen=True)
class Operator:
    """A name to pass to an instruction as `op`; it cannot be called on tiles."""

    name: str
    compute: Callable[..., Any]

    def __call__(self, *operands: Any) -> Any:
        raise ViolationError(
            f"nl.{self.name} on tiles is not in this release; give it to an instruction"
        )


class Binary(Operator):
    pass


class Activation(Operator):
    pass


def _sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    result: NDArray[np.float32] = np.float32(1) / (np.float32(1) + np.exp(-x))
    return result


add = Binary("add", np.add)
subtract = Binary("subtract", np.subtract)
multiply = Binary("multiply", np.multiply)
maximum = Binary("maximum", np.maximum)
greater_equal = Binary("greater_equal", np.greater_equal)
exp = Activation("exp", np.exp)
sigmoid = Activation("sigmoid", _sigmoid)
silu = Activation("silu", lambda x: x * _sigmoid(x))


def ndarray(shape: tuple[int, ...], dtype: Any, buffer: str = "sbuf", name: str = "") -> Tensor:
    return allocate(tuple(shape), dtype, buffer)


def affine_range(start: int, stop: int | None = None, step: int = 1) -> Iterator[int]:
    """Yield the iterations in a shuffled order, each marked as one of a parallel loop."""
    order = _range(start, stop, step)
    now, loop = core(), Loop()
    now.loops.append(loop)
    try:
        for iteration in now.random.permutation(order):
            loop.iteration = int(iteration)
            yield int(iteration)
    finally:
        now.loops.remove(loop)


def sequential_range(start: int, stop: int | None = None, step: int = 1) -> Iterator[int]:
    yield from _range(start, stop, step)


static_range = sequential_range


def _range(start: int, stop: int | None, step: int) -> range:
    return range(start) if stop is None else range(start, stop, step)
