"""nki.isa, as far as the kernels use it. Signatures and limits are the documented ones.

It models NeuronCore-v2, the most restricted: a bias of an activation is a tile, products are
float32.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.training.ops.nki.model.language import Activation, Binary
from tests.training.ops.nki.model.memory import PARTITIONS, Tensor, ViolationError

STATIONARY = 128
MOVING = 512
engine = SimpleNamespace(tensor="tensor")


def dma_copy(dst: Tensor, src: Tensor) -> None:
    _among(dst, "sbuf", "hbm", "shared_hbm")
    _among(src, "sbuf", "hbm", "shared_hbm")
    dst.write(src.read())


def tensor_copy(dst: Tensor, src: Tensor) -> None:
    _on_chip(dst, src)
    dst.write(src.read())


def memset(dst: Tensor, value: float) -> None:
    _on_chip(dst)
    dst.write(np.full(dst.shape, value, np.float32))


def nc_matmul(
    dst: Tensor, stationary: Tensor, moving: Tensor, accumulate: bool | None = None
) -> None:
    """Compute dst = stationary.T @ moving; None adds to dst if it was written before."""
    _among(dst, "psum")
    _among(stationary, "sbuf")
    _among(moving, "sbuf")
    _flat(dst, stationary, moving)
    if stationary.shape[0] != moving.shape[0]:
        raise ViolationError(f"partitions differ: {stationary.shape} and {moving.shape}")
    if stationary.shape[1] > STATIONARY:
        raise ViolationError(f"a stationary tile of {stationary.shape}: over {STATIONARY} columns")
    if moving.shape[1] > MOVING:
        raise ViolationError(f"a moving tile of {moving.shape}: over {MOVING} columns")
    if (stationary.dtype == np.float32) != (moving.dtype == np.float32):
        raise ViolationError(f"float32 goes with float32: {stationary.dtype} and {moving.dtype}")
    found = stationary.read().T @ moving.read()
    written = dst.storage.written[dst.ids]
    if accumulate is None:
        if written.any() != written.all():
            raise ViolationError("a product over memory that is written in part")
        accumulate = bool(written.all())
    dst.write(found + dst.values if accumulate else found, accumulate=accumulate)


def nc_transpose(dst: Tensor, data: Tensor, engine: str) -> None:
    if engine != "tensor":
        raise ViolationError(f"this model knows the tensor engine's transpose, not {engine!r}")
    _among(dst, "psum")
    _among(data, "sbuf")
    _flat(dst, data)
    if max(data.shape) > PARTITIONS:
        raise ViolationError(f"the tensor engine transposes 128 by 128, not {data.shape}")
    if dst.dtype != data.dtype:
        raise ViolationError(f"a transpose keeps the dtype: {data.dtype} to {dst.dtype}")
    dst.write(data.read().T)


def activation(
    dst: Tensor,
    op: Activation,
    data: Tensor,
    bias: Tensor | None = None,
    scale: float | Tensor = 1.0,
) -> None:
    _on_chip(dst, data)
    if not isinstance(op, Activation):
        raise ViolationError(f"{op} is no activation function")
    if bias is not None and not isinstance(bias, Tensor):
        raise ViolationError("a bias is a tile on NeuronCore-v2")
    shift = np.float32(0) if bias is None else _column(bias, data)
    dst.write(op.compute(data.read() * _column(scale, data) + shift))


def tensor_tensor(dst: Tensor, data1: Tensor, data2: Tensor, op: Binary) -> None:
    _on_chip(dst, data1, data2)
    _not_both_in_psum(data1, data2)
    if data1.shape != data2.shape:
        raise ViolationError(f"shapes differ: {data1.shape} and {data2.shape}")
    dst.write(_arithmetic(op)(data1.read(), data2.read()))


def tensor_scalar(
    dst: Tensor,
    data: Tensor,
    op0: Binary,
    operand0: float | Tensor,
    op1: Binary | None = None,
    operand1: float | Tensor | None = None,
) -> None:
    _on_chip(dst, data)
    found = _arithmetic(op0)(data.read(), _column(operand0, data))
    if (op1 is None) != (operand1 is None):
        raise ViolationError("op1 and operand1 go together")
    if op1 is not None and operand1 is not None:
        found = _arithmetic(op1)(found, _column(operand1, data))
    dst.write(found)


def scalar_tensor_tensor(
    dst: Tensor, data: Tensor, op0: Binary, operand0: float | Tensor, op1: Binary, operand1: Tensor
) -> None:
    _on_chip(dst, data, operand1)
    _not_both_in_psum(data, operand1)
    if data.shape != operand1.shape:
        raise ViolationError(f"shapes differ: {data.shape} and {operand1.shape}")
    first = _arithmetic(op0)(data.read(), _column(operand0, data))
    dst.write(_arithmetic(op1)(first, operand1.read()))


def tensor_reduce(dst: Tensor, op: Binary, data: Tensor, axis: int) -> None:
    _on_chip(dst, data)
    if axis != 1:
        raise ViolationError(f"a reduction goes over the columns of a tile, not over axis {axis}")
    compute: Any = _arithmetic(op)
    dst.write(compute.reduce(data.read(), axis=1, keepdims=True))


def affine_select(
    dst: Tensor,
    pattern: list[list[int]],
    channel_multiplier: int,
    on_true_tile: Tensor,
    on_false_value: float,
    cmp_op: Binary,
    offset: int = 0,
) -> None:
    _among(dst, "sbuf")
    _among(on_true_tile, "sbuf")
    _flat(dst, on_true_tile)
    if dst.shape != on_true_tile.shape or len(pattern) != 1 or pattern[0][1] != dst.shape[1]:
        raise ViolationError(f"{pattern} over {on_true_tile.shape} does not fit into {dst.shape}")
    rows, columns = np.indices(dst.shape)
    chosen = cmp_op.compute(offset + channel_multiplier * rows + pattern[0][0] * columns, 0)
    dst.write(np.where(chosen, on_true_tile.read(), np.float32(on_false_value)))


def _among(tile: Tensor, *buffers: str) -> None:
    if not isinstance(tile, Tensor):
        raise ViolationError(f"no tile: {tile!r}")
    if tile.buffer not in buffers:
        raise ViolationError(f"a tile in {tile.buffer} where one in {' or '.join(buffers)} must be")


def _flat(*tiles: Tensor) -> None:
    for tile in tiles:
        if len(tile.shape) != 2:
            raise ViolationError(f"a tile is (partitions, columns) here, not {tile.shape}")


def _on_chip(*tiles: Tensor) -> None:
    for tile in tiles:
        _among(tile, "sbuf", "psum")
    _flat(*tiles)


def _not_both_in_psum(first: Tensor, second: Tensor) -> None:
    if first.buffer == second.buffer == "psum":
        raise ViolationError("the two tiles cannot both be in PSUM")


def _arithmetic(op: Binary) -> Any:
    if not isinstance(op, Binary) or op.name == "greater_equal":
        raise ViolationError(f"{op} is no arithmetic operator")
    return op.compute


def _column(operand: float | Tensor, data: Tensor) -> NDArray[np.float32]:
    """Return a number, or a float32 column (partitions, 1), to combine with a tile."""
    if not isinstance(operand, Tensor):
        return np.float32(operand)  # type: ignore[return-value]
    _on_chip(operand)
    if operand.shape != (data.shape[0], 1) or operand.dtype != np.float32:
        raise ViolationError(f"{operand.shape} {operand.dtype} is no column for {data.shape}")
    return operand.read()
