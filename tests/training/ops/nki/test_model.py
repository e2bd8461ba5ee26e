"""The model of NKI refuses what NKI's documents forbid: breaking any limit raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.training.ops.nki import model
from tests.training.ops.nki.model import ViolationError, jit, simulate

# Any: the tests call with wrong arguments.
isa: Any = model.isa
nl: Any = model.language
INPUT = np.arange(6, dtype=np.float32).reshape(2, 3)


def run(kernel: Callable[..., Any], *arrays: Any, seed: int = 0) -> Any:
    return simulate(jit(kernel), seed)(*arrays)


def sbuf(*shape: int, value: float | None = 0.0) -> Any:
    tile = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    if value is not None:
        isa.memset(tile, value)
    return tile


def psum(*shape: int) -> Any:
    return nl.ndarray(shape, nl.float32, buffer=nl.psum)


def hbm(*shape: int) -> Any:
    return nl.ndarray(shape, nl.float32, buffer=nl.shared_hbm)


def column() -> Any:
    return sbuf(4, 1)


FORBIDDEN: dict[str, tuple[Callable[[], Any], str]] = {
    "partitions": (lambda: sbuf(129, 4), "128 partitions"),
    "bank": (lambda: psum(4, 513), "2048 bytes"),
    "psum dtype": (lambda: nl.ndarray((4, 4), np.float16, nl.psum), "float32"),
    "psum full": (lambda: [psum(4, 512) for _ in range(9)], "psum is full"),
    "sbuf full": (lambda: sbuf(1, 50000), "sbuf is full"),
    "one axis": (lambda: nl.ndarray((4,), nl.float32, nl.sbuf), "a tile of"),
    "stationary": (lambda: isa.nc_matmul(psum(4, 4), sbuf(4, 129), sbuf(4, 4)), "over 128"),
    "moving": (lambda: isa.nc_matmul(psum(4, 4), sbuf(4, 4), sbuf(4, 513)), "over 512"),
    "contraction": (lambda: isa.nc_matmul(psum(4, 4), sbuf(3, 4), sbuf(4, 4)), "partitions"),
    "product's place": (lambda: isa.nc_matmul(sbuf(4, 4), sbuf(4, 4), sbuf(4, 4)), "in sbuf"),
    "operand's place": (lambda: isa.nc_matmul(psum(4, 4), psum(4, 4), sbuf(4, 4)), "in psum"),
    "product's shape": (lambda: isa.nc_matmul(psum(4, 5), sbuf(4, 4), sbuf(4, 4)), "not fit"),
    "product's dtype": (
        lambda: isa.nc_matmul(psum(4, 4), nl.ndarray((4, 4), np.float16), sbuf(4, 4)),
        "float32 goes with float32",
    ),
    "transpose": (lambda: isa.nc_transpose(psum(128, 4), sbuf(4, 129), "tensor"), "128 by 128"),
    "both in psum": (
        lambda: isa.tensor_tensor(sbuf(4, 4), psum(4, 4), psum(4, 4), nl.add),
        "both be in PSUM",
    ),
    "shapes": (lambda: isa.tensor_tensor(sbuf(4, 4), sbuf(4, 4), sbuf(4, 1), nl.add), "differ"),
    "column": (lambda: isa.tensor_scalar(sbuf(4, 4), sbuf(4, 4), nl.add, sbuf(3, 1)), "no column"),
    "operator": (lambda: isa.tensor_scalar(sbuf(4, 4), sbuf(4, 4), nl.exp, 1.0), "arithmetic"),
    "function": (lambda: isa.activation(sbuf(4, 4), nl.add, sbuf(4, 4)), "no activation"),
    "bias": (lambda: isa.activation(sbuf(4, 4), nl.exp, sbuf(4, 4), bias=1.0), "a bias is a tile"),
    "axis": (lambda: isa.tensor_reduce(column(), nl.add, sbuf(4, 4), axis=0), "axis 0"),
    "compute in hbm": (lambda: isa.tensor_copy(hbm(4, 4), sbuf(4, 4)), "in shared_hbm"),
    "dma to psum": (lambda: isa.dma_copy(psum(4, 4), hbm(4, 4)), "in psum"),
    "beyond": (lambda: sbuf(4, 4)[0:4, 2:5], "out of axis 1"),
    "before": (lambda: sbuf(4, 4)[0:4, nl.ds(-1, 2)], "out of axis 1"),
    "nothing": (lambda: sbuf(4, 4)[0:4, 2:2], "out of axis 1"),
    "partition dropped": (lambda: sbuf(4, 4)[0], "cannot be dropped"),
    "stride": (lambda: sbuf(4, 4)[0:4, 0:4:2], "not known"),
    "operators on tiles": (lambda: nl.multiply(sbuf(4, 4), 2.0), "give it to an instruction"),
    "returned from sbuf": (lambda: sbuf(4, 4), "shared_hbm"),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_is_forbidden_raises(name: str) -> None:
    broken, shown = FORBIDDEN[name]
    with pytest.raises(ViolationError, match=shown):
        run(broken)


@pytest.mark.parametrize("argument", ["mask", "is_transpose", "perf_mode"])
def test_unknown_arguments_and_calls_raise(argument: str) -> None:
    with pytest.raises(TypeError, match=argument):
        run(lambda: isa.nc_matmul(psum(4, 4), sbuf(4, 4), sbuf(4, 4), **{argument: 1}))
    with pytest.raises(AttributeError):
        run(lambda: getattr(isa, "iota"))  # noqa: B009


def test_inputs_cannot_be_written() -> None:
    with pytest.raises(ViolationError, match="an input cannot be written"):
        run(lambda x: isa.dma_copy(x, sbuf(2, 3)), INPUT)


def test_nothing_runs_without_the_simulator() -> None:
    with pytest.raises(ViolationError, match="no device"):
        jit(lambda: None)()
    with pytest.raises(ViolationError, match="no kernel runs"):
        sbuf(4, 4)


def test_uninitialised_memory_is_nan() -> None:
    def kernel(x: Any) -> Any:
        y, tile = hbm(2, 4), sbuf(2, 4, value=None)
        isa.dma_copy(tile[0:2, 1:4], x)
        isa.dma_copy(y, tile)
        return y

    y = run(kernel, INPUT)
    assert np.isnan(y[:, 0]).all()
    assert (y[:, 1:] == INPUT).all()


def test_products_add_up_where_psum_was_written() -> None:
    def kernel(x: Any) -> Any:
        y, total, kept, ones = hbm(3, 3), psum(3, 3), sbuf(3, 3), sbuf(2, 3, value=1.0)
        for _ in nl.affine_range(3):
            isa.nc_matmul(total, ones, ones)
        isa.tensor_copy(kept, total)
        isa.dma_copy(y, kept)
        return y

    assert (run(kernel, INPUT) == 6).all()


def carried(x: Any) -> Any:
    y, total = hbm(2, 3), sbuf(2, 3)
    for _ in nl.affine_range(2):
        isa.tensor_scalar(total, total, nl.add, 1.0)
    isa.dma_copy(y, total)
    return y


def overwritten(x: Any) -> Any:
    y, tile = hbm(2, 3), sbuf(2, 3, value=1.0)
    for _ in nl.affine_range(2):
        isa.dma_copy(y, tile)
    return y


def read_ahead(x: Any) -> Any:
    y, tile = hbm(2, 3), sbuf(2, 4)
    for i in nl.affine_range(3):
        isa.tensor_copy(tile[0:2, i : i + 1], tile[0:2, i + 1 : i + 2])
    return y


@pytest.mark.parametrize("kernel", [carried, overwritten, read_ahead])
@pytest.mark.parametrize("seed", range(3))
def test_iterations_of_an_affine_range_cannot_need_each_other(
    kernel: Callable[..., Any], seed: int
) -> None:
    with pytest.raises(ViolationError, match="affine_range"):
        run(kernel, INPUT, seed=seed)


def test_affine_range_takes_another_order_each_time() -> None:
    def order() -> list[int]:
        orders.append(list(nl.affine_range(20)))
        return hbm(1, 1)  # type: ignore[no-any-return]

    orders: list[list[int]] = []
    for seed in range(2):
        run(order, seed=seed)
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20))
