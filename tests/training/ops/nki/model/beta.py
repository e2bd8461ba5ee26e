"""The same model in the style of `neuronxcc.nki`: instructions return tiles.

It knows the calls that training/ops/nki/beta.py makes, and shows that this layer follows the older
namespace's documents: names of arguments, assignment to indices, load and store.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.training.ops.nki import model
from tests.training.ops.nki.model import isa, language
from tests.training.ops.nki.model.memory import Slice, Tensor, allocate


class Indexed(Tensor):
    """A tensor that is written by assignment to an index of it; `...` is all of it."""

    def __getitem__(self, index: Any) -> Tensor:
        return self if index is ... else super().__getitem__(index)

    def __setitem__(self, index: Any, value: Tensor) -> None:
        self[index].write(value.read())


def _allocated(shape: tuple[int, ...], dtype: Any, buffer: str) -> Indexed:
    made = allocate(shape, dtype, buffer)
    return Indexed(made.storage, made.values, made.ids)


def _returned(
    instruction: Callable[..., None], shape: Callable[..., tuple[int, ...]], buffer: str = "sbuf"
) -> Callable[..., Tensor]:
    def called(**operands: Any) -> Tensor:
        dst = _allocated(shape(**operands), np.float32, buffer)
        instruction(dst, **operands)
        return dst

    return called


def _like_data(data: Tensor, **others: Any) -> tuple[int, ...]:
    return data.shape


def _load(src: Tensor, *, dtype: Any) -> Tensor:
    dst = _allocated(src.shape, dtype, "sbuf")
    isa.dma_copy(dst, src)
    return dst


def _store(dst: Tensor, value: Tensor) -> None:
    isa.dma_copy(dst, value)


def _memset(shape: tuple[int, ...], value: float, dtype: Any) -> Tensor:
    dst = _allocated(shape, dtype, "sbuf")
    isa.memset(dst, value)
    return dst


def _affine_select(pred: NDArray[np.bool_], on_true_tile: Tensor, on_false_value: float) -> Tensor:
    dst = _allocated(on_true_tile.shape, np.float32, "sbuf")
    dst.write(np.where(pred, on_true_tile.read(), np.float32(on_false_value)))
    return dst


LANGUAGE = {
    "arange": np.arange,
    "ds": Slice,
    "load": _load,
    "ndarray": _allocated,
    "par_dim": lambda size: size,
    "store": _store,
    **{
        name: getattr(language, name)
        for name in (
            *("add", "greater_equal", "multiply", "exp", "sigmoid", "silu"),
            *("affine_range", "sequential_range", "static_range"),
            *("float32", "psum", "sbuf", "shared_hbm"),
        )
    },
}

ISA = {
    "activation": _returned(isa.activation, _like_data),
    "affine_select": _affine_select,
    "memset": _memset,
    "nc_matmul": _returned(
        isa.nc_matmul,
        lambda stationary, moving: (stationary.shape[1], moving.shape[1]),
        "psum",
    ),
    "nc_transpose": _returned(isa.nc_transpose, lambda data, engine: data.shape[::-1], "psum"),
    "scalar_tensor_tensor": _returned(isa.scalar_tensor_tensor, _like_data),
    "tensor_copy": _returned(isa.tensor_copy, lambda src: src.shape),
    "tensor_engine": "tensor",
    "tensor_reduce": _returned(isa.tensor_reduce, lambda op, data, axis: (data.shape[0], 1)),
    "tensor_scalar": _returned(isa.tensor_scalar, _like_data),
    "tensor_tensor": _returned(isa.tensor_tensor, lambda data1, data2, op: data1.shape),
}


def modules() -> dict[str, ModuleType]:
    """Return the modules that stand in for `neuronxcc.nki`."""
    names = ("neuronxcc", "neuronxcc.nki", "neuronxcc.nki.isa", "neuronxcc.nki.language")
    found = {name: ModuleType(name) for name in names}
    for module in found.values():
        module.__path__ = []
    found["neuronxcc.nki.isa"].__dict__.update(ISA)
    found["neuronxcc.nki.language"].__dict__.update(LANGUAGE)
    found["neuronxcc.nki"].__dict__.update(
        isa=found["neuronxcc.nki.isa"],
        language=found["neuronxcc.nki.language"],
        jit=model.jit,
        simulate_kernel=lambda kernel, *arguments: model.simulate(kernel)(*arguments),
    )
    found["neuronxcc"].__dict__["nki"] = found["neuronxcc.nki"]
    return found
