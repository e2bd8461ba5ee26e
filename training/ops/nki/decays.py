"""Decays of a step's input, or of the state, between steps of a chunk, for both SSD kernels.

With a[t] = delta[t] A, every exponent is a sum of a over a part of the chunk. Each is computed from
its own terms, by products with triangles of ones on the tensor engine: all terms are <= 0, so
nothing cancels in float32, as it would in differences of cumulative sums.

Shapes: t, i, j steps of the chunk (128), r heads of the group.
"""

from __future__ import annotations

from typing import Any

from training.ops.nki.limits import PARTITIONS
from training.ops.nki.tiles import exponential, filled, product, scaled, triangle


def masks() -> tuple[Any, Any, Any, Any, Any]:
    """Make squares of ones and zeros, (128, 128), named by where (row, column) is 1."""
    upto = triangle(-1, 1, 0)  # (t, i): t <= i
    since = triangle(1, -1, 0)  # (i, t): i >= t
    after = triangle(1, -1, -1)  # (t, j): t > j
    before = triangle(-1, 1, -1)  # (j, t): j < t
    always = filled(PARTITIONS, PARTITIONS, 1.0)  # (i, j)
    return upto, since, after, before, always


def decays(a: Any, upto: Any, after: Any, always: Any) -> tuple[Any, Any, Any]:
    """Compute the decays of one chunk from a (t, r), for all heads of a group; each is (128, r).

    `since` is the decay of the state before the chunk up to each step, `until` that of each step up
    to the chunk's end, `whole` that of the state over the chunk, equal on all partitions.
    """
    since = exponential(product(upto, a))  # (i, r)
    until = exponential(product(after, a))  # (j, r)
    whole = exponential(product(always, a))  # (128, r)
    return since, until, whole


def from_source(a: Any, upto: Any, after: Any) -> Any:
    """Compute L^T, the decay from step j to step i >= j, (j, i), else ones; a is (t, 1)."""
    return exponential(product(after, scaled(upto, a)))  # (j, i)


def to_step(a: Any, upto: Any, after: Any) -> Any:
    """Compute L, the decay from step j to step i >= j, (i, j), else ones; a is (t, 1)."""
    return exponential(product(upto, scaled(after, a)))  # (i, j)
