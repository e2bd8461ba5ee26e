"""The kernels of training.ops.gpu.scan, which describes the order that they run in.

A program is one warp and holds the states of some channels, (d, n), in registers. It reads the
inputs of several steps before it computes the first, as there are few warps to hide the memory's
latency. Strides of steps are constants, so most addresses are too. Numbers of steps and chunks have
64 bits: times a stride, they exceed 32 bits in long sequences.

Shapes: b batch, l length (L), d channels (D), n state size (N), k chunks.
"""

# ruff: noqa: N803, N806, RUF005, RUF059  (the paper's own names; in Triton tuples grow by + alone)
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4):
    raise ImportError(f"its kernels need Triton 3.4 or later, but this is {triton.__version__}")

NEVER = tl.constexpr(1e30)
"""The sum of the deltas of a chunk in which a document begins: it makes the decay 0."""
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _softplus(x):
    """log(1 + e^x): max(x, 0) + log(1 + e), e = e^-|x|, whose logarithm is 2 artanh(e / (2 + e)).

    As the argument of artanh is at most 1/3, six terms of its series give float32's precision.
    """
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    q = s * s
    series = 1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11))))
    return tl.maximum(x, 0.0) + 2.0 * s * (1.0 + q * series)


@triton.jit
def _silu(z):
    """Return the sigmoid of z, and z times it."""
    gate = 1.0 / (1.0 + tl.exp(-z))
    return gate, z * gate


@triton.jit
def _places(D: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, CHANNELS: tl.constexpr):
    """Return this program's channels d and states n, and which of them exist."""
    d, n = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, NP)
    return d, n, (d < D) | (D % CHANNELS == 0), (n < N) | (N == NP)


@triton.jit
def _read(x, dt, B, begins, places, inside, DOCUMENTS: tl.constexpr):
    """Return x and dt (d,), B (n,) of a step, 0 beyond the end, and whether a document begins."""
    d, n, is_d, is_n = places
    x_t = tl.load(x + d, mask=is_d & inside, other=0.0)
    dt_t = tl.load(dt + d, mask=is_d & inside, other=0.0)
    B_t = tl.load(B + n, mask=is_n & inside, other=0.0)
    begin = tl.load(begins, mask=inside, other=0) if DOCUMENTS else 0
    return x_t, dt_t, B_t, begin


@triton.jit
def _delta(dt_t, bias, there):
    """Return delta (d,), 0 beyond the end."""
    return tl.where(there, _softplus(dt_t.to(tl.float32) + bias), 0.0)


@triton.jit
def _decay(delta, a, begin, DOCUMENTS: tl.constexpr):
    """Return exp(delta A) (d, n), 0 where a document begins; a is A / ln 2."""
    decay = tl.exp2(delta[:, None] * a)
    return tl.where(begin != 0, 0.0, decay) if DOCUMENTS else decay


@triton.jit
def _advanced(h, given, a, bias, there, DOCUMENTS: tl.constexpr):
    """Return the state (d, n) after a step, and delta (d,)."""
    x_t, dt_t, B_t, begin = given
    delta = _delta(dt_t, bias, there)
    own = (delta * x_t)[:, None] * B_t.to(tl.float32)[None, :]
    return h * _decay(delta, a, begin, DOCUMENTS) + own, delta


@triton.jit
def ends(
    x, dt, A, B, bias, begins, states, sums, L, chunks, x_row, dt_row, b_row,
    X_STEP: tl.constexpr, DT_STEP: tl.constexpr, B_STEP: tl.constexpr, D: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    STEPS: tl.constexpr, EVEN: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Run each chunk from zero: last states -> states (b, k, d, n); sums of delta (b, k, d)."""
    chunk, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    places = _places(D, N, NP, CHANNELS)
    d, n, is_d, is_n = places
    of_state, state = is_d[:, None] & is_n[None, :], d[:, None] * N + n[None, :]
    a = tl.load(A + state, mask=of_state, other=0.0) * LOG2_E
    dt_bias = tl.load(bias + d, mask=is_d, other=0.0)
    first = chunk * CHUNK
    x += b * x_row + first * X_STEP
    dt += b * dt_row + first * DT_STEP
    B += b * b_row + first * B_STEP
    begins += b * L + first
    h = tl.zeros((CHANNELS, NP), tl.float32)
    total = tl.zeros((CHANNELS,), tl.float32)
    for block in range(0, CHUNK, STEPS):
        read = ()
        for j in tl.static_range(STEPS):
            given = _read(
                x + j * X_STEP, dt + j * DT_STEP, B + j * B_STEP, begins + j, places,
                (first + block + j < L) | EVEN, DOCUMENTS,
            )  # fmt: skip
            read = read + (given,)
        for j in tl.static_range(STEPS):
            there = is_d & ((first + block + j < L) | EVEN)
            h, delta = _advanced(h, read[j], a, dt_bias, there, DOCUMENTS)
            total += delta
            if DOCUMENTS:
                total = tl.where(read[j][3] != 0, NEVER, total)
        x += STEPS * X_STEP
        dt += STEPS * DT_STEP
        B += STEPS * B_STEP
        begins += STEPS
    place = (b * chunks + chunk) * D
    tl.store(states + place * N + state, h, mask=of_state)
    tl.store(sums + place + d, total, mask=is_d)


@triton.jit
def across(
    A, states, sums, chunks, D: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr,
    AHEAD: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Replace each chunk's own states (b, k, d, n) by the state before it; BACK: after it.

    A program has SIZE states, and reads those of AHEAD chunks before it needs them.
    """
    b = tl.program_id(1).to(tl.int64)
    state = tl.program_id(0) * SIZE + tl.arange(0, SIZE)  # of (d, n)
    there = state < D * N
    a = tl.load(A + state, mask=there, other=0.0) * LOG2_E
    size, width = tl.full((), D * N, tl.int64), tl.full((), D, tl.int64)
    states, sums = states + b * chunks * size, sums + b * chunks * width
    h = tl.zeros((SIZE,), tl.float32)
    for first in range(0, chunks, AHEAD):
        read = ()
        for j in tl.static_range(AHEAD):
            chunk = chunks - 1 - first - j if BACK else first + j
            inside = there & (chunk >= 0) & (chunk < chunks)
            own = tl.load(states + chunk * size + state, mask=inside, other=0.0)
            total = tl.load(sums + chunk * width + state // N, mask=inside, other=0.0)
            read = read + ((own, total),)
        for j in tl.static_range(AHEAD):
            chunk = chunks - 1 - first - j if BACK else first + j
            inside = there & (chunk >= 0) & (chunk < chunks)
            own, total = read[j]
            tl.store(states + chunk * size + state, h, mask=inside)
            h = h * tl.exp2(total * a) + own


@triton.jit
def outputs(
    x, dt, A, B, C, skip, z, bias, begins, starts, y, L, chunks, x_row, dt_row, b_row, c_row, z_row,
    X_STEP: tl.constexpr, DT_STEP: tl.constexpr, B_STEP: tl.constexpr, C_STEP: tl.constexpr,
    Z_STEP: tl.constexpr, D: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    CHANNELS: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    DOCUMENTS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Compute y (b, l, d) of every chunk, given the states at their starts (b, k, d, n)."""
    chunk, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    places = _places(D, N, NP, CHANNELS)
    d, n, is_d, is_n = places
    of_state, state = is_d[:, None] & is_n[None, :], d[:, None] * N + n[None, :]
    a = tl.load(A + state, mask=of_state, other=0.0) * LOG2_E
    dt_bias = tl.load(bias + d, mask=is_d, other=0.0)
    past = tl.load(skip + d, mask=is_d, other=0.0)
    first = chunk * CHUNK
    x += b * x_row + first * X_STEP
    dt += b * dt_row + first * DT_STEP
    z += b * z_row + first * Z_STEP
    y += (b * L + first) * D
    B += b * b_row + first * B_STEP
    C += b * c_row + first * C_STEP
    begins += b * L + first
    place = (b * chunks + chunk) * D
    h = tl.load(starts + place * N + state, mask=of_state, other=0.0)
    for block in range(0, CHUNK, STEPS):
        read = ()
        for j in tl.static_range(STEPS):
            inside = (first + block + j < L) | EVEN
            given = _read(
                x + j * X_STEP, dt + j * DT_STEP, B + j * B_STEP, begins + j, places,
                inside, DOCUMENTS,
            )  # fmt: skip
            C_t = tl.load(C + j * C_STEP + n, mask=is_n & inside, other=0.0)
            z_t = tl.load(z + j * Z_STEP + d, mask=is_d & inside, other=0.0) if GATED else 0.0
            read = read + ((given, C_t, z_t),)
        for j in tl.static_range(STEPS):
            there = is_d & ((first + block + j < L) | EVEN)
            given, C_t, z_t = read[j]
            h, delta = _advanced(h, given, a, dt_bias, there, DOCUMENTS)
            y_t = tl.sum(h * C_t.to(tl.float32)[None, :], axis=1) + past * given[0]
            if GATED:
                gate, open_ = _silu(z_t.to(tl.float32))
                y_t = y_t * open_
            tl.store(y + j * D + d, y_t.to(y.dtype.element_ty), mask=there)
        x += STEPS * X_STEP
        dt += STEPS * DT_STEP
        z += STEPS * Z_STEP
        y += STEPS * D
        B += STEPS * B_STEP
        C += STEPS * C_STEP
        begins += STEPS


@triton.jit
def back(
    dt, A, C, z, bias, begins, dy, flows, L, chunks, dt_row, c_row, z_row, dy_row,
    DT_STEP: tl.constexpr, C_STEP: tl.constexpr, Z_STEP: tl.constexpr, DY_STEP: tl.constexpr,
    D: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, DOCUMENTS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Compute what each chunk alone passes back to the state before it -> flows (b, k, d, n)."""
    chunk, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    places = _places(D, N, NP, CHANNELS)
    d, n, is_d, is_n = places
    of_state, state = is_d[:, None] & is_n[None, :], d[:, None] * N + n[None, :]
    a = tl.load(A + state, mask=of_state, other=0.0) * LOG2_E
    dt_bias = tl.load(bias + d, mask=is_d, other=0.0)
    first = (chunk + 1) * CHUNK - STEPS
    dt += b * dt_row + first * DT_STEP
    z += b * z_row + first * Z_STEP
    dy += b * dy_row + first * DY_STEP
    C += b * c_row + first * C_STEP
    begins += b * L + first
    flow = tl.zeros((CHANNELS, NP), tl.float32)
    for block in range(0, CHUNK, STEPS):
        read = ()
        for j in tl.static_range(STEPS):
            inside = (first - block + j < L) | EVEN
            given = _read(
                dy + j * DY_STEP, dt + j * DT_STEP, C + j * C_STEP, begins + j, places,
                inside, DOCUMENTS,
            )  # fmt: skip
            z_t = tl.load(z + j * Z_STEP + d, mask=is_d & inside, other=0.0) if GATED else 0.0
            read = read + ((given, z_t),)
        for j in tl.static_range(STEPS - 1, -1, -1):
            given, z_t = read[j]
            dy_t, dt_t, C_t, begin = given
            dy_t = dy_t.to(tl.float32)
            delta = _delta(dt_t, dt_bias, is_d & ((first - block + j < L) | EVEN))
            if GATED:
                gate, open_ = _silu(z_t.to(tl.float32))
                dy_t = dy_t * open_
            g = flow + dy_t[:, None] * C_t.to(tl.float32)[None, :]
            flow = g * _decay(delta, a, begin, DOCUMENTS)
        dt -= STEPS * DT_STEP
        z -= STEPS * Z_STEP
        dy -= STEPS * DY_STEP
        C -= STEPS * C_STEP
        begins -= STEPS
    place = (b * chunks + chunk) * D
    tl.store(flows + place * N + state, flow, mask=of_state)


@triton.jit
def gradients(
    x, dt, A, B, C, skip, z, bias, begins, starts, flows, between, dy,
    dx, ddt, dz, dB, dC, dA, dskip, dbias, L, chunks, x_row, dt_row, b_row, c_row, z_row, dy_row,
    X_STEP: tl.constexpr, DT_STEP: tl.constexpr, B_STEP: tl.constexpr, C_STEP: tl.constexpr,
    Z_STEP: tl.constexpr, DY_STEP: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    NP: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr,
    EVEN: tl.constexpr, DOCUMENTS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of every chunk.

    Per step: dx, ddt, dz (b, l, d), and, for this program's channels, dB, dC (d / CHANNELS, b, l,
    n). Per chunk: dA (b, k, d, n), dskip and dbias (b, k, d). between (b, k, CHUNK / STEPS, d, n)
    is scratch space for the states inside the chunk.
    """
    part, chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    places = _places(D, N, NP, CHANNELS)
    d, n, is_d, is_n = places
    of_state, state = is_d[:, None] & is_n[None, :], d[:, None] * N + n[None, :]
    a = tl.load(A + state, mask=of_state, other=0.0) * LOG2_E
    dt_bias = tl.load(bias + d, mask=is_d, other=0.0)
    past = tl.load(skip + d, mask=is_d, other=0.0)
    first = chunk * CHUNK
    x += b * x_row + first * X_STEP
    dt += b * dt_row + first * DT_STEP
    B += b * b_row + first * B_STEP
    begins += b * L + first
    place = (b * chunks + chunk) * D
    starts, flows, dA = starts + place * N, flows + place * N, dA + place * N
    blocks: tl.constexpr = CHUNK // STEPS
    between += place * blocks * N

    # The state at the start of each block; that of the first is known.
    h = tl.load(starts + state, mask=of_state, other=0.0)
    for block in range(0, blocks - 1):
        read = ()
        for j in tl.static_range(STEPS):
            given = _read(
                x + j * X_STEP, dt + j * DT_STEP, B + j * B_STEP, begins + j, places,
                (first + block * STEPS + j < L) | EVEN, DOCUMENTS,
            )  # fmt: skip
            read = read + (given,)
        for j in tl.static_range(STEPS):
            there = is_d & ((first + block * STEPS + j < L) | EVEN)
            h, delta = _advanced(h, read[j], a, dt_bias, there, DOCUMENTS)
        between += D * N
        tl.store(between + state, h, mask=of_state)
        x += STEPS * X_STEP
        dt += STEPS * DT_STEP
        B += STEPS * B_STEP
        begins += STEPS

    # Block by block to the chunk's start: forward, keeping the states, then back.
    last = first + (blocks - 1) * STEPS
    dy += b * dy_row + last * DY_STEP
    z += b * z_row + last * Z_STEP
    C += b * c_row + last * C_STEP
    row = b * L + last
    dx, ddt, dz = dx + row * D, ddt + row * D, dz + row * D
    row += part * tl.num_programs(2) * L
    dB, dC = dB + row * N, dC + row * N
    flow = tl.load(flows + state, mask=of_state, other=0.0)
    dA_sum = tl.zeros((CHANNELS, NP), tl.float32)
    dskip_sum = tl.zeros((CHANNELS,), tl.float32)
    dbias_sum = tl.zeros((CHANNELS,), tl.float32)
    for block in range(0, blocks):
        at = last - block * STEPS
        read = ()
        for j in tl.static_range(STEPS):
            inside = (at + j < L) | EVEN
            given = _read(
                x + j * X_STEP, dt + j * DT_STEP, B + j * B_STEP, begins + j, places,
                inside, DOCUMENTS,
            )  # fmt: skip
            C_t = tl.load(C + j * C_STEP + n, mask=is_n & inside, other=0.0)
            dy_t = tl.load(dy + j * DY_STEP + d, mask=is_d & inside, other=0.0)
            z_t = tl.load(z + j * Z_STEP + d, mask=is_d & inside, other=0.0) if GATED else 0.0
            read = read + ((given, C_t, dy_t, z_t),)
        kept = (h,)  # the state before each step, and after the last
        for j in tl.static_range(STEPS):
            there = is_d & ((at + j < L) | EVEN)
            h, delta = _advanced(h, read[j][0], a, dt_bias, there, DOCUMENTS)
            kept = kept + (h,)
        for j in tl.static_range(STEPS - 1, -1, -1):
            inside = (at + j < L) | EVEN
            there = is_d & inside
            given, C_t, dy_t, z_t = read[j]
            x_t, dt_t, B_t, begin = given
            delta = _delta(dt_t, dt_bias, there)
            x_t, dy_t = x_t.to(tl.float32), dy_t.to(tl.float32)
            B_t, C_t = B_t.to(tl.float32), C_t.to(tl.float32)
            if GATED:
                gate, open_ = _silu(z_t.to(tl.float32))
                y_t = tl.sum(kept[j + 1] * C_t[None, :], axis=1) + past * x_t
                # silu'(z) = s + z s (1 - s)
                dz_t = dy_t * y_t * (gate + open_ * (1.0 - gate))
                tl.store(dz + j * D + d, dz_t.to(dz.dtype.element_ty), mask=there)
                dy_t = dy_t * open_
            dskip_sum += dy_t * x_t
            dC_t = tl.sum(kept[j + 1] * dy_t[:, None], axis=0)
            tl.store(dC + j * N + n, dC_t, mask=is_n & inside)
            g = flow + dy_t[:, None] * C_t[None, :]
            dB_t = tl.sum(g * (delta * x_t)[:, None], axis=0)
            tl.store(dB + j * N + n, dB_t, mask=is_n & inside)
            du = tl.sum(g * B_t[None, :], axis=1)
            dx_t = du * delta + dy_t * past
            tl.store(dx + j * D + d, dx_t.to(dx.dtype.element_ty), mask=there)
            flow = g * _decay(delta, a, begin, DOCUMENTS)
            of_decay = flow * kept[j]  # the gradient of delta A
            dA_sum += of_decay * delta[:, None]
            ddelta = tl.sum(of_decay * a, axis=1) * LN_2 + du * x_t
            # The derivative of softplus; 1 - e^-delta equals it, but is inexact for a small delta.
            draw = ddelta * tl.where(there, tl.sigmoid(dt_t.to(tl.float32) + dt_bias), 0.0)
            dbias_sum += draw
            tl.store(ddt + j * D + d, draw.to(ddt.dtype.element_ty), mask=there)
        x -= STEPS * X_STEP
        dt -= STEPS * DT_STEP
        z -= STEPS * Z_STEP
        dy -= STEPS * DY_STEP
        B -= STEPS * B_STEP
        C -= STEPS * C_STEP
        begins -= STEPS
        dx, ddt, dz = dx - STEPS * D, ddt - STEPS * D, dz - STEPS * D
        dB, dC = dB - STEPS * N, dC - STEPS * N
        between -= D * N
        if block < blocks - 2:
            h = tl.load(between + state, mask=of_state, other=0.0)
        else:
            h = tl.load(starts + state, mask=of_state, other=0.0)
    tl.store(dA + state, dA_sum, mask=of_state)
    tl.store(dskip + place + d, dskip_sum, mask=is_d)
    tl.store(dbias + place + d, dbias_sum, mask=is_d)
