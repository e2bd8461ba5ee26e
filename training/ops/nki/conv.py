"""Causal depthwise convolution with SiLU, forward and backward. Gu & Dao 2023, section 3.4.

With k taps, and x zero before the start:

    z[t] = bias + sum over j of weight[j] x[t - (k - 1) + j],   y = z sigmoid(z)   (or y = z)

Backward from dy, a tile's z is recomputed, including the bias, since SiLU' is taken at z:

    dz[t]      = dy[t] s (1 + z (1 - s)),  s = sigmoid(z[t])
    dx[t]      = sum over j of weight[j] dz[t + (k - 1) - j],   dz zero beyond the end
    dweight[j] = sum over t of dz[t] x[t - (k - 1) + j],        dbias = sum over t of dz[t]

Channels are the partitions, steps the columns: a tap is one instruction on the vector engine, and a
shift is an offset into what it reads. x comes with k - 1 zeros before it, and for the backward pass
x and dy with k - 1 zeros after it, so that all tiles have one shape. All arithmetic is float32.

Shapes: b batch, d channels, k taps, l length, w steps of a tile; l is a multiple of w.
"""

from __future__ import annotations

from typing import Any

from training.ops.nki.limits import PARTITIONS
from training.ops.nki.namespace import jit, nisa, nl
from training.ops.nki.tiles import (
    add_to,
    empty,
    filled,
    loaded,
    row_sums,
    scaled,
    scaled_plus,
    times,
)


def convolved(x: Any, weight: Any, taps: int, steps: int) -> Any:
    """Sum the taps, without bias, for x (128, k - 1 + steps)."""
    z = scaled(x[0:PARTITIONS, 0:steps], weight[0:PARTITIONS, 0:1])  # (128, steps)
    for j in nl.static_range(1, taps):
        seen = x[0:PARTITIONS, j : j + steps]  # (128, steps)
        z = scaled_plus(seen, weight[0:PARTITIONS, j : j + 1], z)  # (128, steps)
    return z


@jit
def conv_forward(x: Any, weight: Any, bias: Any, steps: int, silu: bool) -> Any:
    """Compute y (b, d, l) for x (b, d, k - 1 + l), weight (d, k) and bias (d, 1); w is `steps`."""
    b, d, padded = x.shape
    k = weight.shape[1]
    length = padded - (k - 1)
    y = nl.ndarray((b, d, length), dtype=x.dtype, buffer=nl.shared_hbm)  # (b, d, l)
    for ic in nl.affine_range(d // PARTITIONS):
        channels = nl.ds(ic * PARTITIONS, PARTITIONS)
        taps = loaded(weight[channels, 0:k], PARTITIONS, k)  # (128, k)
        shift = loaded(bias[channels, 0:1], PARTITIONS, 1)  # (128, 1)
        for ib in nl.affine_range(b):
            for it in nl.affine_range(length // steps):
                columns = nl.ds(it * steps, k - 1 + steps)
                seen = loaded(x[ib, channels, columns], PARTITIONS, k - 1 + steps)  # (128, k-1+w)
                z = convolved(seen, taps, k, steps)  # (128, w)
                result = empty(PARTITIONS, steps)  # (128, w)
                if silu:
                    nisa.activation(dst=result, op=nl.silu, data=z, bias=shift)
                else:
                    nisa.tensor_scalar(dst=result, data=z, op0=nl.add, operand0=shift)
                nisa.dma_copy(dst=y[ib, channels, nl.ds(it * steps, steps)], src=result)
    return y


def through_silu(dy: Any, z: Any, bias: Any) -> Any:
    """Compute dz from dy and z without its bias, both (128, m), and the bias (128, 1)."""
    rows, columns = z.shape
    s, inner = empty(rows, columns), empty(rows, columns)  # (128, m)
    nisa.activation(dst=s, op=nl.sigmoid, data=z, bias=bias)
    # 1 - s, then z (1 - s), then s (1 + z (1 - s)).
    nisa.tensor_scalar(dst=inner, data=s, op0=nl.multiply, operand0=-1.0, op1=nl.add, operand1=1.0)
    slope = empty(rows, columns)  # (128, m)
    nisa.scalar_tensor_tensor(
        dst=slope, data=z, op0=nl.add, operand0=bias, op1=nl.multiply, operand1=inner
    )
    nisa.scalar_tensor_tensor(
        dst=slope, data=slope, op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=s
    )
    return times(dy, slope)  # (128, m)


@jit
def conv_backward(dy: Any, x: Any, weight: Any, bias: Any, steps: int, silu: bool) -> Any:
    """Compute dx (b, d, l), dweight (d, k) and dbias (d, 1).

    dy is (b, d, l + k - 1), x (b, d, k - 1 + l + k - 1), weight (d, k), bias (d, 1); w is `steps`.
    """
    b, d, padded = dy.shape
    k = weight.shape[1]
    length = padded - (k - 1)
    ahead, around = steps + k - 1, steps + 2 * (k - 1)
    dx = nl.ndarray((b, d, length), dtype=x.dtype, buffer=nl.shared_hbm)  # (b, d, l)
    dweight = nl.ndarray((d, k), dtype=nl.float32, buffer=nl.shared_hbm)  # (d, k)
    dbias = nl.ndarray((d, 1), dtype=nl.float32, buffer=nl.shared_hbm)  # (d, 1)
    for ic in nl.affine_range(d // PARTITIONS):
        channels = nl.ds(ic * PARTITIONS, PARTITIONS)
        taps = loaded(weight[channels, 0:k], PARTITIONS, k)  # (128, k)
        shift = loaded(bias[channels, 0:1], PARTITIONS, 1)  # (128, 1)
        dtaps, dshift = filled(PARTITIONS, k, 0.0), filled(PARTITIONS, 1, 0.0)  # (128, k), (128, 1)
        ones = filled(PARTITIONS, steps, 1.0)  # (128, w)
        for ib in nl.sequential_range(b):
            for it in nl.sequential_range(length // steps):
                begin = it * steps
                x_part = x[ib, channels, nl.ds(begin, around)]  # (128, w + 2 (k - 1))
                seen = loaded(x_part, PARTITIONS, around)  # (128, w + 2 (k - 1))
                dy_part = dy[ib, channels, nl.ds(begin, ahead)]  # (128, w + k - 1)
                dz = loaded(dy_part, PARTITIONS, ahead)  # (128, w + k - 1)
                if silu:
                    z = convolved(seen, taps, k, ahead)  # (128, w + k - 1)
                    dz = through_silu(dz, z, shift)  # (128, w + k - 1)
                inside = dz[0:PARTITIONS, 0:steps]  # (128, w)
                last = dz[0:PARTITIONS, k - 1 : k - 1 + steps]  # (128, w)
                result = scaled(last, taps[0:PARTITIONS, 0:1])  # (128, w)
                found = empty(PARTITIONS, k)  # (128, k)
                row_sums(found[0:PARTITIONS, 0:1], inside, seen[0:PARTITIONS, 0:steps])
                for j in nl.static_range(1, k):
                    later = dz[0:PARTITIONS, k - 1 - j : k - 1 - j + steps]  # (128, w)
                    result = scaled_plus(later, taps[0:PARTITIONS, j : j + 1], result)  # (128, w)
                    earlier = seen[0:PARTITIONS, j : j + steps]  # (128, w)
                    row_sums(found[0:PARTITIONS, j : j + 1], inside, earlier)
                nisa.dma_copy(dst=dx[ib, channels, nl.ds(begin, steps)], src=result)
                add_to(dtaps, found)  # (128, k)
                added = empty(PARTITIONS, 1)  # (128, 1)
                row_sums(added, inside, ones)
                add_to(dshift, added)  # (128, 1)
        nisa.dma_copy(dst=dweight[channels, 0:k], src=dtaps)
        nisa.dma_copy(dst=dbias[channels, 0:1], src=dshift)
    return dx, dweight, dbias
