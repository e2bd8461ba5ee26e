"""SSD backward, through the chunks from last to first; Dao & Gu 2024, sections 6 and 7.

For the equations of ssd_forward.py, given dy and dS', the gradient of the state after the chunk,
with sums over the chunk's steps:

    M[i, j]  = dy[i] . delta[j] x[j]                 what L[i, j] (C[i].B[j]) is multiplied by
    d(dx)[j] = sum over i of L[i, j] (C[i].B[j]) dy[i]  +  until[j] B[j] dS'      of delta[j] x[j]
    dB[j]    = sum over heads ( sum over i of M[i, j] L[i, j] C[i]  +  until[j] delta[j] dS' x[j] )
    dC[i]    = sum over heads ( sum over j of M[i, j] L[i, j] B[j]  +  since[i] S dy[i] )
    dS       = whole dS'  +  sum over i of since[i] C[i] dy[i]^T

The gradient of an exponent is the decay times its gradient; a[t] is in all exponents over step t:

    da[t] = sum over i >= t > j of M[i, j] L[i, j] (C[i].B[j])             those of L
          + sum over i >= t of C[i] . (since[i] S dy[i])                   those of since
          + sum over j < t of B[j] . (until[j] delta[j] dS' x[j])          those of until
          + whole sum over (n, p) of S dS'                                 that of whole

and ddelta = A da + x . d(dx), dA = sum of delta da, dx = delta d(dx) + D dy, dD = sum of dy . x.
The sums of da are products with triangles of ones: no difference of two large sums is taken, so
no digits are lost to cancellation. M and L are (i, j). All arithmetic is float32.

Shapes as in ssd_forward.py.
"""

# ruff: noqa: N803, N806  (A, B, C, D, G, L, M are the names of the equations)
from __future__ import annotations

from typing import Any

from training.ops.nki.decays import decays, masks, to_step
from training.ops.nki.limits import CHUNK, STATE
from training.ops.nki.namespace import jit, nisa, nl
from training.ops.nki.tiles import (
    add_to,
    decay,
    empty,
    filled,
    loaded,
    on_every_partition,
    product,
    row_sums,
    scaled,
    scaled_plus,
    times,
    transposed,
)


@jit
def ssd_backward(
    dy: Any, x: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, states: Any
) -> tuple[Any, ...]:
    """Compute the gradients of x, delta, A, B, C and D, those of A and D as (b, h).

    dy and x are (b, l, h p), delta (b, l, h), A and D (1, h), B and C (b, l, g n), and the states
    (b, q, g, n, r p) are those of the forward pass.
    """
    b, length, width = x.shape
    h, g = delta.shape[2], B.shape[2] // STATE
    r, p = h // g, width // h
    f32, hbm = nl.float32, nl.shared_hbm
    dx = nl.ndarray((b, length, width), dtype=x.dtype, buffer=hbm)  # (b, l, h p)
    ddelta = nl.ndarray((b, length, h), dtype=f32, buffer=hbm)  # (b, l, h)
    dB = nl.ndarray((b, length, g * STATE), dtype=B.dtype, buffer=hbm)  # (b, l, g n)
    dC = nl.ndarray((b, length, g * STATE), dtype=C.dtype, buffer=hbm)  # (b, l, g n)
    dA = nl.ndarray((b, h), dtype=f32, buffer=hbm)  # (b, h)
    dD = nl.ndarray((b, h), dtype=f32, buffer=hbm)  # (b, h)
    upto, since_t, after, before, always = masks()  # each (128, 128)
    for ib in nl.affine_range(b):
        for ig in nl.affine_range(g):
            heads, columns = nl.ds(ig * r, r), nl.ds(ig * STATE, STATE)
            A_row = on_every_partition(loaded(A[0:1, heads], 1, r))  # (128, r)
            D_row = on_every_partition(loaded(D[0:1, heads], 1, r))  # (128, r)
            dstate = filled(STATE, r * p, 0.0)  # (n, r p): of the state after the chunk
            dA_rows, dD_rows = filled(CHUNK, r, 0.0), filled(CHUNK, r, 0.0)  # (t, r), (i, r)
            for back in nl.sequential_range(length // CHUNK):
                iq = length // CHUNK - 1 - back
                steps = nl.ds(iq * CHUNK, CHUNK)
                B_rows = loaded(B[ib, steps, columns], CHUNK, STATE)  # (j, n)
                C_rows = loaded(C[ib, steps, columns], CHUNK, STATE)  # (i, n)
                B_turned = transposed(B_rows)  # (n, j)
                G = times(product(transposed(C_rows), B_turned), since_t)  # (i, j)
                delta_rows = loaded(delta[ib, steps, heads], CHUNK, r)  # (t, r)
                a = times(delta_rows, A_row)  # (t, r)
                since, until, whole = decays(a, upto, after, always)  # each (128, r)

                dB_rows = filled(CHUNK, STATE, 0.0)  # (j, n): by way of the states
                dC_rows = filled(CHUNK, STATE, 0.0)  # (i, n): by way of the states
                dG = filled(CHUNK, CHUNK, 0.0)  # (i, j)
                of_L, of_since = empty(CHUNK, r), empty(CHUNK, r)  # (t, r), (i, r)
                of_until, of_whole = empty(CHUNK, r), empty(STATE, r)  # (j, r), (n, r)
                direct, dD_part = empty(CHUNK, r), empty(CHUNK, r)  # (t, r), (i, r)
                for ir in nl.sequential_range(r):
                    one, mine = nl.ds(ir, 1), nl.ds(ir * p, p)
                    theirs = nl.ds((ig * r + ir) * p, p)
                    x_rows = loaded(x[ib, steps, theirs], CHUNK, p)  # (j, p)
                    dy_rows = loaded(dy[ib, steps, theirs], CHUNK, p)  # (i, p)
                    state = loaded(states[ib, iq, ig, 0:STATE, mine], STATE, p)  # (n, p)
                    dheld = dstate[0:STATE, mine]  # (n, p)
                    weighted = scaled(x_rows, delta_rows[0:CHUNK, one])  # (j, p)
                    dy_turned = transposed(dy_rows)  # (p, i)
                    x_turned = transposed(weighted)  # (p, j)

                    L = to_step(a[0:CHUNK, one], upto, after)  # (i, j)
                    LG = times(L, G)  # (i, j)
                    M = product(dy_turned, x_turned)  # (i, j)
                    add_to(dG, times(L, M))  # (i, j)
                    over = product(since_t, times(LG, M))  # (t, j): sums over i >= t
                    row_sums(of_L[0:CHUNK, one], after, over)  # (t, 1): over j < t

                    dB_head = product(x_turned, transposed(dheld))  # (j, n)
                    dB_head = scaled(dB_head, until[0:CHUNK, one])  # (j, n)
                    add_to(dB_rows, dB_head)
                    row_sums(of_until[0:CHUNK, one], dB_head, B_rows)  # (j, 1)
                    dC_head = product(dy_turned, transposed(state))  # (i, n)
                    dC_head = scaled(dC_head, since[0:CHUNK, one])  # (i, n)
                    add_to(dC_rows, dC_head)
                    row_sums(of_since[0:CHUNK, one], dC_head, C_rows)  # (i, 1)
                    fading = scaled(state, whole[0:STATE, one])  # (n, p)
                    row_sums(of_whole[0:STATE, one], fading, dheld)  # (n, 1)

                    beyond = scaled(product(B_turned, dheld), until[0:CHUNK, one])  # (j, p)
                    add_to(beyond, product(LG, dy_rows))  # (j, p): now all of d(dx)
                    row_sums(direct[0:CHUNK, one], beyond, x_rows)  # (j, 1)
                    row_sums(dD_part[0:CHUNK, one], dy_rows, x_rows)  # (i, 1)
                    skipped = scaled(dy_rows, D_row[0:CHUNK, one])  # (j, p)
                    result = scaled_plus(beyond, delta_rows[0:CHUNK, one], skipped)  # (j, p)
                    nisa.dma_copy(dst=dx[ib, steps, theirs], src=result)

                    reading = product(C_rows, scaled(dy_rows, since[0:CHUNK, one]))  # (n, p)
                    decay(dheld, whole[0:STATE, one], reading)  # (n, p)

                masked = times(dG, since_t)  # (i, j)
                add_to(dB_rows, product(masked, C_rows))  # (j, n)
                add_to(dC_rows, product(transposed(masked), B_rows))  # (i, n)
                nisa.dma_copy(dst=dB[ib, steps, columns], src=dB_rows)
                nisa.dma_copy(dst=dC[ib, steps, columns], src=dC_rows)

                add_to(of_L, product(since_t, of_since))  # (t, r): sums over i >= t
                add_to(of_L, product(before, of_until))  # (t, r): sums over j < t
                add_to(of_L, product(always, of_whole))  # (t, r): now all of da
                add_to(direct, times(of_L, A_row))  # (t, r): now all of ddelta
                nisa.dma_copy(dst=ddelta[ib, steps, heads], src=direct)
                add_to(dA_rows, times(of_L, delta_rows))  # (t, r)
                add_to(dD_rows, dD_part)  # (i, r)

            nisa.dma_copy(dst=dA[nl.ds(ib, 1), heads], src=summed(dA_rows, always))
            nisa.dma_copy(dst=dD[nl.ds(ib, 1), heads], src=summed(dD_rows, always))
    return dx, ddelta, dA, dB, dC, dD


def summed(rows: Any, always: Any) -> Any:
    """Sum over the partitions, (128, r) -> (1, r), with a tile of ones (128, 128)."""
    result = empty(1, rows.shape[1])  # (1, r)
    nisa.tensor_copy(dst=result, src=product(always[0:CHUNK, 0:1], rows))
    return result
