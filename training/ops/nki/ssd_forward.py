"""SSD forward, by matrix products over chunks of 128 steps. Dao & Gu 2024, sections 6 and 7.

For each head, with B and C shared by the r heads of a group, a[t] = delta[t] A, and S the state
(n, p) before the chunk:

    y[i] = sum over j <= i of (C[i].B[j]) L[i, j] delta[j] x[j]      inside the chunk
         + since[i] C[i] S  +  D x[i]                                from before it
    S'   = whole S + sum over j of until[j] delta[j] B[j] x[j]^T     to the next chunk

    L[i, j] = exp(a[j+1] + ... + a[i])     since[i] = exp(a[0] + ... + a[i])
    until[j] = exp(a[j+1] + ... + a[127])  whole = since[127]

C B is computed once per group. The matrices of a chunk are transposed here, (j, i): the tensor
engine sums over partitions, and y sums over j. All arithmetic is float32.

Shapes: b batch, l length, g groups, r heads of a group, h = g r heads, p channels of a head,
n = 128 states, i, j and t steps of a chunk, q chunks. The backward pass takes the states before
each chunk, which the forward pass returns.
"""

# ruff: noqa: N803, N806  (A, B, C, D, G, L are the paper's own names)
from __future__ import annotations

from typing import Any

from training.ops.nki.decays import decays, from_source, masks
from training.ops.nki.limits import CHUNK, STATE
from training.ops.nki.namespace import jit, nisa, nl
from training.ops.nki.tiles import (
    add_to,
    decay,
    filled,
    loaded,
    on_every_partition,
    product,
    scaled,
    scaled_plus,
    times,
    transposed,
)


@jit
def ssd_forward(x: Any, delta: Any, A: Any, B: Any, C: Any, D: Any) -> Any:
    """Compute y (b, l, h p) and the states (b, q, g, n, r p).

    x is (b, l, h p), delta (b, l, h), A and D (1, h), B and C (b, l, g n).
    """
    b, length, width = x.shape
    h, g = delta.shape[2], B.shape[2] // STATE
    r, p = h // g, width // h
    y = nl.ndarray((b, length, width), dtype=x.dtype, buffer=nl.shared_hbm)  # (b, l, h p)
    shape = (b, length // CHUNK, g, STATE, r * p)
    states = nl.ndarray(shape, dtype=nl.float32, buffer=nl.shared_hbm)  # (b, q, g, n, r p)
    upto, _, after, _, always = masks()  # each (128, 128)
    for ib in nl.affine_range(b):
        for ig in nl.affine_range(g):
            heads, columns = nl.ds(ig * r, r), nl.ds(ig * STATE, STATE)
            A_row = on_every_partition(loaded(A[0:1, heads], 1, r))  # (128, r)
            D_row = on_every_partition(loaded(D[0:1, heads], 1, r))  # (128, r)
            state = filled(STATE, r * p, 0.0)  # (n, r p)
            for iq in nl.sequential_range(length // CHUNK):
                steps = nl.ds(iq * CHUNK, CHUNK)
                nisa.dma_copy(dst=states[ib, iq, ig, 0:STATE, 0 : r * p], src=state)
                B_rows = loaded(B[ib, steps, columns], CHUNK, STATE)  # (j, n)
                C_rows = loaded(C[ib, steps, columns], CHUNK, STATE)  # (i, n)
                C_turned = transposed(C_rows)  # (n, i)
                G = times(product(transposed(B_rows), C_turned), upto)  # (j, i)
                delta_rows = loaded(delta[ib, steps, heads], CHUNK, r)  # (j, r)
                a = times(delta_rows, A_row)  # (t, r)
                since, until, whole = decays(a, upto, after, always)  # each (128, r)
                for ir in nl.affine_range(r):
                    one, mine = nl.ds(ir, 1), nl.ds(ir * p, p)
                    theirs = nl.ds((ig * r + ir) * p, p)
                    held = state[0:STATE, mine]  # (n, p)
                    x_rows = loaded(x[ib, steps, theirs], CHUNK, p)  # (j, p)
                    weighted = scaled(x_rows, delta_rows[0:CHUNK, one])  # (j, p)

                    L = from_source(a[0:CHUNK, one], upto, after)  # (j, i)
                    passed = scaled(product(C_turned, held), since[0:CHUNK, one])  # (i, p)
                    result = scaled_plus(x_rows, D_row[0:CHUNK, one], passed)  # (i, p)
                    add_to(result, product(times(L, G), weighted))  # (i, p)
                    nisa.dma_copy(dst=y[ib, steps, theirs], src=result)

                    fading = scaled(weighted, until[0:CHUNK, one])  # (j, p)
                    decay(held, whole[0:STATE, one], product(B_rows, fading))  # (n, p)
    return y, states
