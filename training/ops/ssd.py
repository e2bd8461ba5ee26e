"""SSD, the state space layer of Mamba-2, by matrix products; memory linear in the length.

Dao & Gu 2024, sections 5 and 6. For each head, with B and C shared by the heads of a group:

    delta = softplus(dt + dt_bias), clamped to a limit
    h[t] = exp(delta[t] A) h[t-1] + delta[t] B[t] x[t]
    y[t] = C[t] h[t] + D x[t]

Shapes: b batch, l length, h heads, g groups, r = h / g heads of a group, p channels of a head (the
paper's P), n state size (the paper's N), c steps of a chunk (the paper's Q).

The torch implementation (section 6, the block decomposition) cuts the sequence into chunks. With
L[i, j] = exp(delta[j+1] A + ... + delta[i] A) for i >= j, and S the state before the chunk:

    y[i] = sum over j <= i of C[i].B[j] L[i, j] delta[j] x[j]    inside: attention with a mask
         + exp(delta[0] A + ... + delta[i] A) C[i] S             what earlier chunks pass on

C B and the products with states are computed once per group, and B and C are never expanded to
heads: a state is held as (b, g, n, r p), so that the heads of a group are adjacent in one matrix.

Every exponent is a sum of delta A with delta >= 0 and A < 0, hence <= 0: nothing can overflow,
whatever the length. Sums over a part of a chunk are differences of cumulative sums, taken in
float64: in float32 a small sum after a large step would be lost to the rounding of both.

Only the inputs and the state at each chunk's start are saved for the backward pass, which goes
through the chunks from last to first and recomputes the rest.

With several documents in a row, a step sees only its own. This needs zeros in C B, which is one
matrix for all heads of a group, and in the decays of a state, and only in chunks in which a
document begins; all other decays stay as they are.
"""

# ruff: noqa: N803, N806  (A, B, C, D, G, L are the paper's own names)
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.ops.dispatch import IN_PIECES, Choice, Implementation, on_gpu, on_neuron
from training.ops.documents import Documents, Seen
from training.ops.nki import torch_ops
from training.ops.piece_states import by_row, ssd_after, ssd_before
from training.ops.pieces import Piece
from training.ops.softplus import softplus

CPU_CHUNK = 64
"""Steps of a chunk on a CPU, whatever the model's: all that a chunk needs then fits the cache. A
GPU uses the model's, since few large products are better there than many small ones."""

NO_LIMIT = (0.0, math.inf)
"""The default minimum and maximum of delta: all that softplus can return."""

FAINT = -60.0
"""Minimum exponent of a decay. In float32 e^-60 vanishes next to any other step, and smaller
factors lead to denormal numbers, which make a CPU several times slower."""


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    chunk: int,
    dt_bias: Tensor | None = None,
    limit: tuple[float, float] = NO_LIMIT,
    documents: Documents | None = None,
) -> Tensor:
    """Compute y (b, l, h, p) of the equations above, for x (b, l, h, p), dt (b, l, h).

    A, D and dt_bias are (h), A must be < 0; B and C are (b, l, g, n), where g divides h and head i
    belongs to group i // (h / g). The state starts at zero, and again at zero wherever one of the
    `documents` begins. `chunk` is c; the result depends on it only by rounding. limit: the minimum
    and maximum of delta. Computed in float32 (float64 for float64 inputs) whatever the dtype of the
    inputs; the result has the dtype of x.
    """
    run = (OF_PIECES if isinstance(documents, Piece) else CHOICE)(x)
    y: Tensor = run(x, dt, A, B, C, D, dt_bias, chunk, limit, documents)  # (b, l, h, p)
    return y


@torch.no_grad()
def ssd_from(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    chunk: int,
    dt_bias: Tensor | None = None,
    limit: tuple[float, float] = NO_LIMIT,
) -> Tensor:
    """Compute `ssd` from a state (b, g, n, r p), which is updated to the last step."""
    inputs = _Inputs(x, dt, A, B, C, D, dt_bias, limit)
    y = torch.empty_like(x)  # (b, l, h, p)
    for cut in _cuts(x, chunk):
        part = inputs.chunk(cut)
        y[:, cut] = part.read(state)  # (b, c, h, p)
        state.copy_(part.passed(state))  # (b, g, n, r p)
    return y


def _cuts(x: Tensor, chunk: int) -> list[slice]:
    """Cut the length into chunks; the last one may be shorter."""
    steps = CPU_CHUNK if x.device.type == "cpu" else chunk
    return [slice(at, min(at + steps, x.shape[1])) for at in range(0, x.shape[1], steps)]


class _Inputs:
    """The inputs, in float32 or wider, a chunk at a time: bfloat16 is never widened as a whole."""

    def __init__(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        dt_bias: Tensor | None,
        limit: tuple[float, float],
        documents: Documents | None = None,
    ) -> None:
        self.limit, self.documents = limit, documents
        self.work = torch.promote_types(x.dtype, torch.float32)
        self.x, self.dt, self.B, self.C = x, dt, B, C
        self.groups = B.shape[2]
        self.A = self.by_group(A.to(self.work))  # (g, r, 1)
        self.D = self.by_group(D.to(self.work))  # (g, r, 1)
        self.dt_bias = None if dt_bias is None else self.by_group(dt_bias.to(self.work))

    def by_group(self, head: Tensor) -> Tensor:
        return head.unflatten(0, (self.groups, -1))[..., None]  # (h,) -> (g, r, 1)

    def rows(self, x: Tensor, cut: slice) -> Tensor:
        """Return a chunk of x (b, l, h, p) as (b, g, c, r, p), a view if it is wide already."""
        wide = x[:, cut].to(self.work)  # (b, c, h, p)
        return wide.unflatten(2, (self.groups, -1)).transpose(1, 2)  # (b, g, c, r, p)

    def raw(self, cut: slice) -> Tensor:
        """Return dt + dt_bias of a chunk, (b, g, r, c)."""
        dt = self.dt[:, cut].to(self.work).transpose(1, 2)  # (b, h, c)
        raw = dt.unflatten(1, (self.groups, -1))  # (b, g, r, c)
        return raw if self.dt_bias is None else raw + self.dt_bias  # (b, g, r, c)

    def chunk(self, cut: slice) -> _Chunk:
        return _Chunk(
            x=self.rows(self.x, cut),  # (b, g, c, r, p)
            raw=self.raw(cut),  # (b, g, r, c)
            A=self.A,
            B=self.B[:, cut].to(self.work).transpose(1, 2),  # (b, g, c, n)
            C=self.C[:, cut].to(self.work).transpose(1, 2),  # (b, g, c, n)
            D=self.D,
            limit=self.limit,
            seen=None if self.documents is None else self.documents.seen(cut),
        )


class _Chunk:
    """One chunk: the values that both passes need."""

    def __init__(
        self,
        x: Tensor,
        raw: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        limit: tuple[float, float],
        seen: Seen | None,
    ) -> None:
        self.x, self.raw, self.A, self.B, self.C, self.D = x, raw, A, B, C, D
        self.limit, self.seen = limit, seen
        free = softplus(raw)  # (b, g, r, c)
        self.delta = free if limit == NO_LIMIT else free.clamp(*limit)  # (b, g, r, c)
        sums = (self.delta.double() * A.double()).cumsum(-1)  # (b, g, r, c)
        between = (sums[..., :, None] - sums[..., None, :]).to(x.dtype)  # (b, g, r, c, c)
        # Above the diagonal the difference would be positive; G has zeros there.
        self.L = between.clamp_(FAINT, 0.0).exp_()  # (b, g, r, c, c)
        self.G = self.shown(C @ B.transpose(2, 3))[:, :, None]  # (b, g, 1, c, c)
        self.LG = self.L * self.G  # (b, g, r, c, c)
        # Decays of S up to each step, of each step up to the chunk's end, of S over the chunk.
        self.since = sums.to(x.dtype).clamp_(min=FAINT).exp_()  # (b, g, r, c)
        self.until = self.L[..., -1, :]  # (b, g, r, c)
        if seen is not None:
            self.since *= seen.before  # (b, g, r, c)
            self.until = self.until * seen.until  # (b, g, r, c)
        self.whole = self.since[..., -1]  # (b, g, r)

    def shown(self, pairs: Tensor) -> Tensor:
        """Zero the pairs (b, g, c, c), in place, in which step i does not see step j."""
        return pairs.tril_() if self.seen is None else pairs.mul_(self.seen.inside)

    def slope(self) -> Tensor:
        """Return the derivative of delta, (b, g, r, c): the sigmoid, and 0 beyond the limit."""
        slope = torch.sigmoid(self.raw)  # (b, g, r, c)
        if self.limit == NO_LIMIT:
            return slope
        return slope * (softplus(self.raw) == self.delta)  # (b, g, r, c)

    def inside(self) -> Tensor:
        """Return the matrix from x to y in the chunk, (b, g, r, c, c), with D on its diagonal."""
        matrix = self.LG * self.delta[..., None, :]  # (b, g, r, c, c)
        matrix.diagonal(dim1=-2, dim2=-1).add_(self.D)  # (b, g, r, c)
        return matrix  # (b, g, r, c, c)

    def from_state(self, state: Tensor) -> Tensor:
        """Compute C[i] S without its decay: (b, g, n, r p) -> (b, g, c, r, p)."""
        return (self.C @ state).unflatten(3, self.x.shape[3:])  # (b, g, c, r, p)

    def read(self, state: Tensor) -> Tensor:
        """Compute y (b, c, h, p) from the state before the chunk, (b, g, n, r p)."""
        inside = (self.inside() @ self.x.transpose(2, 3)).transpose(2, 3)  # (b, g, c, r, p)
        y = torch.addcmul(inside, self.from_state(state), by_row(self.since))  # (b, g, c, r, p)
        return y.transpose(1, 2).flatten(2, 3)  # (b, c, h, p)

    def weighted(self) -> Tensor:
        """Return delta x, decayed up to the chunk's end, (b, g, c, r p)."""
        return (self.x * by_row(self.until * self.delta)).flatten(3)  # (b, g, c, r p)

    def decayed(self, state: Tensor) -> Tensor:
        """Decay a state (b, g, n, r p) over the whole chunk."""
        by_head = state.unflatten(3, self.x.shape[3:])  # (b, g, n, r, p)
        return (by_head * self.whole[:, :, None, :, None]).flatten(3)  # (b, g, n, r p)

    def passed(self, state: Tensor) -> Tensor:
        """Compute the state after the chunk from the one before it, both (b, g, n, r p)."""
        return _plus_product(self.decayed(state), self.B.transpose(2, 3), self.weighted())


def _plus_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Compute total + left @ right, (b, g, i, j) + (b, g, i, k) @ (b, g, k, j)."""
    parts = (one.flatten(0, 1) for one in (total, left, right))  # (b g, ...)
    return torch.baddbmm(*parts).unflatten(0, total.shape[:2])  # (b, g, i, j)


class _SSD(torch.autograd.Function):
    """The torch implementation."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        dt_bias: Tensor | None,
        chunk: int,
        limit: tuple[float, float] = NO_LIMIT,
        documents: Documents | None = None,
    ) -> Tensor:
        inputs = _Inputs(x, dt, A, B, C, D, dt_bias, limit, documents)
        ctx.limit, ctx.documents = limit, documents
        ctx.cuts = _cuts(x, chunk)
        y = torch.empty_like(x)  # (b, l, h, p)
        (b, _, h, p), (g, n) = x.shape, B.shape[2:]
        state = x.new_zeros(b, g, n, h // g * p, dtype=inputs.work)  # (b, g, n, r p)
        if isinstance(documents, Piece):
            state = ssd_before(inputs, ctx.cuts, documents)  # (b, g, n, r p)
        states = []
        for cut in ctx.cuts:
            part = inputs.chunk(cut)
            y[:, cut] = part.read(state)  # (b, c, h, p)
            states.append(state)
            state = part.passed(state)  # (b, g, n, r p)
        ctx.save_for_backward(x, dt, A, B, C, D, dt_bias, *states)
        return y  # (b, l, h, p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, dt, A, B, C, D, dt_bias, *states = ctx.saved_tensors
        inputs = _Inputs(x, dt, A, B, C, D, dt_bias, ctx.limit, ctx.documents)
        dx, ddt = torch.empty_like(x), torch.empty_like(dt)  # (b, l, h, p), (b, l, h)
        dB, dC = torch.empty_like(B), torch.empty_like(C)  # (b, l, g, n)
        dA, dD, dbias = (torch.zeros_like(inputs.A[..., 0]) for _ in range(3))  # (g, r)
        dstate = torch.zeros_like(states[0])  # (b, g, n, r p): of the state after the chunk
        if isinstance(ctx.documents, Piece):
            dstate = ssd_after(inputs, ctx.cuts, ctx.documents, dy)  # (b, g, n, r p)
        for index in reversed(range(len(ctx.cuts))):
            cut = ctx.cuts[index]
            part, state = inputs.chunk(cut), states[index]  # state (b, g, n, r p)
            found = _Gradients(part, state, inputs.rows(dy, cut), dstate)
            dstate = found.dstate  # (b, g, n, r p)
            dx[:, cut] = found.dx.transpose(1, 2).flatten(2, 3)  # (b, c, h, p)
            dB[:, cut] = found.dB.transpose(1, 2)  # (b, c, g, n)
            dC[:, cut] = found.dC.transpose(1, 2)  # (b, c, g, n)
            draw = found.ddelta * part.slope()  # (b, g, r, c)
            ddt[:, cut] = draw.flatten(1, 2).transpose(1, 2)  # (b, c, h)
            dA += (found.da * part.delta).sum((0, 3))  # (g, r)
            dD += found.dD.sum(0)  # (g, r)
            dbias += draw.sum((0, 3))  # (g, r)
        return (
            dx,
            ddt,
            dA.flatten().to(A.dtype),  # (h,)
            dB,
            dC,
            dD.flatten().to(D.dtype),  # (h,)
            None if dt_bias is None else dbias.flatten().to(dt_bias.dtype),  # (h,)
            None,
            None,
            None,
        )


class _Gradients:
    """The gradients of one chunk, from dy (b, g, c, r, p) and that of the state after it."""

    def __init__(self, part: _Chunk, state: Tensor, dy: Tensor, dafter: Tensor) -> None:
        x, delta = part.x, part.delta
        dy_since = dy * by_row(part.since)  # (b, g, c, r, p)
        # The gradient of each step's delta x by way of the state, without the decay.
        back = (part.B @ dafter).unflatten(3, x.shape[3:])  # (b, g, c, r, p)
        inside = part.inside().transpose(3, 4) @ dy.transpose(2, 3)  # (b, g, r, c, p)
        beyond = by_row(part.until * delta)  # (b, g, c, r, 1)
        self.dx = torch.addcmul(inside.transpose(2, 3), back, beyond)  # (b, g, c, r, p)

        dmatrix = dy.transpose(2, 3) @ x.permute(0, 1, 3, 4, 2)  # (b, g, r, c, c)
        self.dD = dmatrix.diagonal(dim1=-2, dim2=-1).sum(-1)  # (b, g, r)
        dLG = dmatrix * part.LG  # (b, g, r, c, c)
        dinside = dLG.sum(-2)  # (b, g, r, c): of delta[j] as the weight of x[j] inside
        doutside = (back * x).sum(-1).transpose(2, 3) * part.until  # (b, g, r, c): and beyond
        dmatrix.mul_(part.L).mul_(delta[..., None, :])  # (b, g, r, c, c): of each G
        dG = part.shown(dmatrix.sum(2))  # (b, g, c, c)
        dB, dC = dG.transpose(2, 3) @ part.C, dG @ part.B  # (b, g, c, n)
        self.dB = _plus_product(dB, part.weighted(), dafter.transpose(2, 3))  # (b, g, c, n)
        self.dC = _plus_product(dC, dy_since.flatten(3), state.transpose(2, 3))  # (b, g, c, n)

        faded, read = part.decayed(dafter), part.C.transpose(2, 3)  # (b, g, n, r p), (b, g, n, c)
        by_head = (state * faded).sum(2).unflatten(2, x.shape[3:])  # (b, g, r, p)
        dwhole = by_head.sum(-1)  # (b, g, r): of the exponent of `whole`
        self.dstate = _plus_product(faded, read, dy_since.flatten(3))  # (b, g, n, r p)

        # a = delta A of a step is in the exponent of all that passes over that step. Its gradient
        # sums over pairs i >= t > j; taken as a difference of two sums over i, it needs float64.
        flow = dLG.mul_(delta[..., None, :])  # (b, g, r, c, c): of each L's exponent
        ends = flow.sum(-1, dtype=torch.double) - flow.sum(-2, dtype=torch.double)  # (b, g, r, c)
        ends += (part.from_state(state) * dy_since).sum(-1).transpose(2, 3)  # (b, g, r, c)
        passing = ends.flip(-1).cumsum(-1).flip(-1).to(x.dtype)  # (b, g, r, c): all i >= t
        entered = doutside * delta  # (b, g, r, c): of each `until`'s exponent
        before = entered.cumsum(-1) - entered  # (b, g, r, c): all j < t
        self.da = passing + before + dwhole[..., None]  # (b, g, r, c)
        self.ddelta = self.da * part.A + dinside + doutside  # (b, g, r, c)


def _fast(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor | None,
    chunk: int,
    limit: tuple[float, float] = NO_LIMIT,
    documents: Documents | None = None,
) -> Tensor:
    """mamba-ssm's Triton kernels."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    y: Tensor = mamba_chunk_scan_combined(
        x,
        dt,
        A.float(),
        B,
        C,
        chunk,
        D=D.float(),
        dt_bias=None if dt_bias is None else dt_bias.float(),
        seq_idx=None if documents is None else documents.seq_idx,
        dt_softplus=True,
        dt_limit=limit,
    )  # (b, l, h, p)
    return y


CHOICE = Choice(
    "ssd",
    [
        Implementation(
            name="mamba-ssm", run=_fast, module="mamba_ssm.ops.triton.ssd_combined", unfit=on_gpu
        ),
        Implementation(name="nki", run=torch_ops.ssd, module=torch_ops.NKI, unfit=on_neuron),
        Implementation(name="torch", run=_SSD.apply),
    ],
)
OF_PIECES = Choice("ssd", [Implementation(name="torch", run=_SSD.apply)], IN_PIECES)
