"""`neuronxcc.nki` with the calling convention of the current `nki`, as far as the kernels need it.

There an instruction returns a tile, and a part of a tile is written by assigning to an index of it.
So a tile here is one of theirs with an index, and an instruction's result is assigned to `dst`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import neuronxcc.nki as beta
import neuronxcc.nki.isa as beta_isa
import neuronxcc.nki.language as beta_nl

jit = beta.jit


def simulate(kernel: Any) -> Callable[..., Any]:
    """Return the kernel as a function of numpy arrays, computed by the compiler's simulator."""
    return lambda *arguments: beta.simulate_kernel(kernel, *arguments)


class Tile:
    """A part of a tile in SBUF or PSUM, (partitions, columns)."""

    def __init__(self, whole: Any, index: Any = ...) -> None:
        self.whole, self.index = whole, index

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.read().shape
        return rows, columns

    def __getitem__(self, index: Any) -> Tile:
        assert self.index is ..., "a part of a part"
        return Tile(self.whole, index)

    def read(self) -> Any:
        return self.whole[self.index]

    def write(self, value: Any) -> None:
        self.whole[self.index] = value


def _value(operand: Any) -> Any:
    return operand.read() if isinstance(operand, Tile) else operand


def _ndarray(shape: tuple[int, ...], dtype: Any, buffer: Any) -> Any:
    if buffer is beta_nl.shared_hbm:
        return beta_nl.ndarray(shape, dtype=dtype, buffer=buffer)
    rows, columns = shape
    whole = beta_nl.ndarray((beta_nl.par_dim(rows), columns), dtype=dtype, buffer=buffer)
    return Tile(whole)


def _dma_copy(dst: Any, src: Any) -> None:
    if isinstance(dst, Tile):
        dst.write(beta_nl.load(src, dtype=dst.whole.dtype))
    else:
        beta_nl.store(dst, value=src.read())


def _into(instruction: Callable[..., Any]) -> Callable[..., None]:
    """Make an instruction that returns a tile write it to `dst` instead."""

    def written(dst: Tile, **operands: Any) -> None:
        dst.write(instruction(**{name: _value(one) for name, one in operands.items()}))

    return written


def _memset(dst: Tile, value: float) -> None:
    dst.write(beta_isa.memset(dst.shape, value, dtype=dst.whole.dtype))


def _affine_select(
    dst: Tile,
    pattern: list[list[int]],
    channel_multiplier: int,
    on_true_tile: Tile,
    on_false_value: float,
    cmp_op: Any,
    offset: int,
) -> None:
    """Select where offset + channel_multiplier row + step column >= 0, the only comparison used."""
    assert cmp_op is nl.greater_equal
    [[step, columns]] = pattern
    row = beta_nl.arange(dst.shape[0])[:, None]
    column = beta_nl.arange(columns)[None, :]
    chosen = offset + channel_multiplier * row + step * column >= 0
    dst.write(beta_isa.affine_select(chosen, on_true_tile.read(), on_false_value))


nl = SimpleNamespace(
    **{
        name: getattr(beta_nl, name)
        for name in (
            "add",
            "affine_range",
            "ds",
            "exp",
            "float32",
            "greater_equal",
            "multiply",
            "psum",
            "sbuf",
            "sequential_range",
            "shared_hbm",
            "sigmoid",
            "silu",
            "static_range",
        )
    },
    ndarray=_ndarray,
)

nisa = SimpleNamespace(
    **{
        name: _into(getattr(beta_isa, name))
        for name in (
            "activation",
            "nc_matmul",
            "nc_transpose",
            "scalar_tensor_tensor",
            "tensor_copy",
            "tensor_reduce",
            "tensor_scalar",
            "tensor_tensor",
        )
    },
    affine_select=_affine_select,
    dma_copy=_dma_copy,
    engine=SimpleNamespace(tensor=beta_isa.tensor_engine),
    memset=_memset,
)
