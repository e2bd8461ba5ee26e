"""Building blocks of the kernels. All tiles are float32; a tile is (partitions, columns).

A product here is what the tensor engine computes: stationary (k, m) and moving (k, n) give
stationary^T moving, (m, n), summed over the partitions of both.
"""

from __future__ import annotations

from typing import Any

from training.ops.nki.limits import PARTITIONS
from training.ops.nki.namespace import nisa, nl


def empty(rows: int, columns: int) -> Any:
    return nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.sbuf)  # (rows, columns)


def filled(rows: int, columns: int, value: float) -> Any:
    tile = empty(rows, columns)  # (rows, columns)
    nisa.memset(dst=tile, value=value)
    return tile


def loaded(source: Any, rows: int, columns: int) -> Any:
    """Load a part of HBM, of this shape and any dtype."""
    tile = empty(rows, columns)  # (rows, columns)
    nisa.dma_copy(dst=tile, src=source)
    return tile


def product(stationary: Any, moving: Any) -> Any:
    """Compute stationary^T moving, (k, m) and (k, n) -> (m, n), in PSUM."""
    shape = (stationary.shape[1], moving.shape[1])
    result = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)  # (m, n)
    nisa.nc_matmul(dst=result, stationary=stationary, moving=moving)
    return result


def transposed(tile: Any) -> Any:
    """Transpose by way of PSUM, (m, n) -> (n, m)."""
    rows, columns = tile.shape
    turned = nl.ndarray((columns, rows), dtype=nl.float32, buffer=nl.psum)  # (n, m)
    nisa.nc_transpose(dst=turned, data=tile, engine=nisa.engine.tensor)
    result = empty(columns, rows)  # (n, m)
    nisa.tensor_copy(dst=result, src=turned)
    return result


def times(left: Any, right: Any) -> Any:
    """Multiply element by element, (m, n); one of the two may be in PSUM."""
    result = empty(left.shape[0], left.shape[1])  # (m, n)
    nisa.tensor_tensor(dst=result, data1=left, data2=right, op=nl.multiply)
    return result


def add_to(total: Any, tile: Any) -> None:
    """Add a tile to another in place, (m, n)."""
    nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)


def scaled(tile: Any, column: Any) -> Any:
    """Multiply each row by its number in a column, (m, n) by (m, 1)."""
    result = empty(tile.shape[0], tile.shape[1])  # (m, n)
    nisa.tensor_scalar(dst=result, data=tile, op0=nl.multiply, operand0=column)
    return result


def scaled_plus(tile: Any, column: Any, other: Any) -> Any:
    """Compute tile * column + other, (m, n), (m, 1) and (m, n); at most one tile in PSUM."""
    result = empty(tile.shape[0], tile.shape[1])  # (m, n)
    nisa.scalar_tensor_tensor(
        dst=result, data=tile, op0=nl.multiply, operand0=column, op1=nl.add, operand1=other
    )
    return result


def decay(state: Any, column: Any, added: Any) -> None:
    """Multiply a state by a column in place and add to it, (m, n), (m, 1) and (m, n)."""
    nisa.scalar_tensor_tensor(
        dst=state, data=state, op0=nl.multiply, operand0=column, op1=nl.add, operand1=added
    )


def exponential(tile: Any) -> Any:
    result = empty(tile.shape[0], tile.shape[1])  # (m, n)
    nisa.activation(dst=result, op=nl.exp, data=tile)
    return result


def row_sums(dst: Any, left: Any, right: Any) -> None:
    """Write the sums over the columns of left * right, (m, n), to dst (m, 1)."""
    nisa.tensor_reduce(dst=dst, op=nl.add, data=times(left, right), axis=1)


def triangle(row_step: int, column_step: int, offset: int) -> Any:
    """Make a square of ones where offset + row_step row + column_step column >= 0, else zeros."""
    result = empty(PARTITIONS, PARTITIONS)  # (m, m)
    nisa.affine_select(
        dst=result,
        pattern=[[column_step, PARTITIONS]],
        channel_multiplier=row_step,
        on_true_tile=filled(PARTITIONS, PARTITIONS, 1.0),
        on_false_value=0.0,
        cmp_op=nl.greater_equal,
        offset=offset,
    )
    return result


def on_every_partition(row: Any) -> Any:
    """Repeat a row (1, n) on all partitions, (128, n): a product of one term with ones."""
    repeated = product(filled(1, PARTITIONS, 1.0), row)  # (128, n)
    result = empty(PARTITIONS, row.shape[1])  # (128, n)
    nisa.tensor_copy(dst=result, src=repeated)
    return result
