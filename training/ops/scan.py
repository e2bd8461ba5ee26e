"""Selective scan: the linear recurrence at the heart of Mamba-1, with memory linear in the length.

Gu & Dao 2023, section 3.3.2 and algorithm 2, with its surroundings in a block:

    delta = softplus(dt + dt_bias)
    h[t] = exp(delta[t] A) h[t-1] + delta[t] B[t] x[t]
    y[t] = (C[t] h[t] + D x[t]) * silu(z[t])

Shapes: b batch, l length, d channels (the paper's E or d_inner), n state size (the paper's N).

The torch implementation cuts the sequence into chunks of c steps, and a chunk into S segments of K
steps. All segments of a chunk advance together (K vectorized steps); if there are several, their
ends are combined first (S steps). Every factor is exp(delta A) with delta >= 0 and A < 0, hence in
(0, 1]: nothing can overflow, whatever the length. Only the inputs and the state at each chunk's
start are saved for the backward pass, which recomputes the rest. At the start of a document the
factor is 0, so nothing passes, forward or backward.
"""

# ruff: noqa: N803, N806  (A, B, C, D are the paper's own names)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.ops.dispatch import IN_PIECES, Choice, Implementation, on_gpu, on_gpu_at_most_float32
from training.ops.documents import FORGETS, Documents
from training.ops.piece_states import scan_after, scan_before
from training.ops.pieces import Piece
from training.ops.softplus import softplus

CUT = {"cpu": (32, 32), "cuda": (256, 16)}
"""(c, K) by device. On a CPU a chunk's states fit the cache, and a step of a single segment is
enough work; on a GPU few large steps are better than many small ones."""


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    documents: Documents | None = None,
) -> Tensor:
    """Compute y of the equations above, for x, dt, z (b, l, d), A (d, n), B, C (b, l, n).

    D and dt_bias are (d); A must be < 0; without z there is no gate. The state starts at zero, and
    again at zero wherever one of the `documents` begins. Computed in float32 (float64 for float64
    inputs) whatever the dtype of the inputs; the result has the dtype of x.
    """
    run = (OF_PIECES if isinstance(documents, Piece) else CHOICE)(x)
    y: Tensor = run(x, dt, A, B, C, D, z, dt_bias, documents)  # (b, l, d)
    return y


@torch.no_grad()
def selective_scan_from(
    h: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> Tensor:
    """Compute `selective_scan` from the state h (b, n, d), which is updated to the last step."""
    chunk, segment = CUT[x.device.type]
    inputs = _Inputs(x, dt, A, B, C, D, z, dt_bias)
    ys = []
    for at in range(0, x.shape[1], chunk):
        part = inputs.chunk(at, chunk)
        _, states = _states(part, inputs.A, h, segment)  # (b, c, n, d)
        ys.append(part.gated(_read(part.C, states), inputs.D))  # (b, c, d)
        h.copy_(states[:, -1])  # (b, n, d)
    return torch.cat(ys, dim=1).to(x.dtype)  # (b, l, d)


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
        z: Tensor | None,
        dt_bias: Tensor | None,
        documents: Documents | None = None,
    ) -> None:
        self.documents = documents
        self.work = torch.promote_types(x.dtype, torch.float32)
        self.x, self.dt, self.B, self.C, self.z = x, dt, B, C, z
        self.A = A.to(self.work).t().contiguous()  # (n, d): the channels are contiguous
        self.D = D.to(self.work)  # (d,)
        self.dt_bias = None if dt_bias is None else dt_bias.to(self.work)  # (d,)

    def chunk(self, at: int, length: int) -> _Chunk:
        x, dt, B, C = (
            one[:, at : at + length].to(self.work) for one in (self.x, self.dt, self.B, self.C)
        )  # (b, c, d) twice, (b, c, n) twice
        z = None if self.z is None else self.z[:, at : at + length].to(self.work)  # (b, c, d)
        raw = dt if self.dt_bias is None else dt + self.dt_bias  # (b, c, d)
        stop = at + x.shape[1]
        begin = () if self.documents is None else self.documents.begin_in(at, stop)
        return _Chunk(x, raw, B, C, z, begin)


class _Chunk:
    """A chunk's inputs: x, z, delta before and after softplus (b, c, d), B and C (b, c, n).

    begin: the row and the step of each document that begins here.
    """

    def __init__(
        self,
        x: Tensor,
        raw: Tensor,
        B: Tensor,
        C: Tensor,
        z: Tensor | None,
        begin: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.x, self.raw, self.B, self.C, self.z, self.begin = x, raw, B, C, z, begin
        self.delta = softplus(raw)  # (b, c, d)

    def gated(self, y: Tensor, D: Tensor) -> Tensor:
        """Add the skip D x and apply the gate; overwrites y (b, c, d)."""
        y = y.addcmul_(self.x, D)  # (b, c, d)
        return y if self.z is None else y.mul_(F.silu(self.z))  # (b, c, d)


class _Scan(torch.autograd.Function):
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
        z: Tensor | None,
        dt_bias: Tensor | None,
        documents: Documents | None,
    ) -> Tensor:
        chunk, segment = ctx.cut = CUT[x.device.type]
        ctx.documents = documents
        inputs = _Inputs(x, dt, A, B, C, D, z, dt_bias, documents)
        h = torch.zeros_like(inputs.A).repeat(x.shape[0], 1, 1)  # (b, n, d)
        if isinstance(documents, Piece):
            h = scan_before(inputs, _cuts(x, chunk), documents)  # (b, n, d)
        y = torch.empty_like(x)  # (b, l, d)
        starts = []
        for at in range(0, x.shape[1], chunk):
            part = inputs.chunk(at, chunk)
            starts.append(h)
            _, states = _states(part, inputs.A, h, segment)  # (b, c, n, d)
            y[:, at : at + chunk] = part.gated(_read(part.C, states), inputs.D)  # (b, c, d)
            h = states[:, -1].clone()  # (b, n, d)
        ctx.save_for_backward(x, dt, A, B, C, D, z, dt_bias, torch.stack(starts))
        return y  # (b, l, d)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, dt, A, B, C, D, z, dt_bias, starts = ctx.saved_tensors  # starts: (l/c, b, n, d)
        chunk, segment = ctx.cut
        inputs = _Inputs(x, dt, A, B, C, D, z, dt_bias, ctx.documents)
        dx, ddt = torch.empty_like(x), torch.empty_like(dt)  # (b, l, d)
        dB, dC = torch.empty_like(B), torch.empty_like(C)  # (b, l, n)
        dz = None if z is None else torch.empty_like(z)  # (b, l, d)
        dA = torch.zeros_like(inputs.A)  # (n, d)
        dD, dbias = torch.zeros_like(inputs.D), torch.zeros_like(inputs.D)  # (d,)
        # What the steps after the chunk pass back to its last state.
        inflow = torch.zeros_like(starts[0])  # (b, n, d)
        if isinstance(ctx.documents, Piece):
            inflow = scan_after(inputs, _cuts(x, chunk), ctx.documents, dy)  # (b, n, d)
        for index in reversed(range(len(starts))):
            at = index * chunk
            cut = slice(at, at + chunk)
            part = inputs.chunk(at, chunk)
            decay, h = _states(part, inputs.A, starts[index], segment)  # (b, c, n, d)
            dyc = dy[:, cut].to(inputs.work)  # (b, c, d)
            if part.z is not None and dz is not None:
                gate = torch.sigmoid(part.z)  # (b, c, d)
                y = _read(part.C, h).addcmul_(part.x, inputs.D)  # (b, c, d)
                # silu'(z) = s + z s (1 - s)
                dz[:, cut] = dyc * y * gate * (1 + part.z * (1 - gate))  # (b, c, d)
                dyc = dyc * part.z * gate  # (b, c, d)
            dD += (dyc * part.x).sum(dim=(0, 1))  # (d,)
            dC[:, cut] = (h @ dyc[..., None]).squeeze(3)  # (b, c, n)
            # g is dL/dh, and flow[t] what step t passes back to the state before it.
            g, flow, inflow = _back(part.C, dyc, decay, inflow, segment)  # (b, c, n, d) twice
            u = part.delta * part.x  # (b, c, d)
            du = (part.B[:, :, None, :] @ g).squeeze(2)  # (b, c, d)
            dB[:, cut] = (g @ u[..., None]).squeeze(3)  # (b, c, n)
            dx[:, cut] = torch.addcmul(du * part.delta, dyc, inputs.D)  # (b, c, d)
            # dL/d(delta A) = flow[t] h[t-1], computed in place of flow.
            flow[:, 1:] *= h[:, :-1]  # (b, c - 1, n, d)
            flow[:, 0] *= starts[index]  # (b, n, d)
            ddelta = torch.mul(flow, inputs.A, out=g).sum(dim=2)  # (b, c, d)
            ddelta += du * part.x  # (b, c, d)
            draw = ddelta * torch.sigmoid(part.raw)  # (b, c, d): softplus' is the sigmoid
            ddt[:, cut] = draw  # (b, c, d)
            dbias += draw.sum(dim=(0, 1))  # (d,)
            dA += flow.mul_(part.delta[:, :, None, :]).sum(dim=(0, 1))  # (n, d)
        return (
            dx,
            ddt,
            dA.t().to(A.dtype),
            dB,
            dC,
            dD.to(D.dtype),
            dz,
            None if dt_bias is None else dbias.to(dt_bias.dtype),
            None,
        )


def _cuts(x: Tensor, chunk: int) -> list[slice]:
    return [slice(at, min(at + chunk, x.shape[1])) for at in range(0, x.shape[1], chunk)]


def _read(C: Tensor, states: Tensor) -> Tensor:
    """C[t] h[t]: (b, c, n), (b, c, n, d) -> (b, c, d)."""
    return (C[:, :, None, :] @ states).squeeze(2)  # (b, c, d)


def _states(part: _Chunk, A: Tensor, h: Tensor, segment: int) -> tuple[Tensor, Tensor]:
    """Return a chunk's decays exp(delta A) and states, both (b, c, n, d), from the state before it.

    A (n, d), h (b, n, d).
    """
    decay = torch.exp_(part.delta[:, :, None, :] * A)  # (b, c, n, d)
    for row, step in part.begin:
        decay[row, step].zero_()  # (n, d)
    u = part.delta * part.x  # (b, c, d)
    states = part.B[..., None] * u[:, :, None, :]  # (b, c, n, d), so far only the inputs
    d, s = _fold(decay, segment), _fold(states, segment)  # K times (b, S, n, d)
    begins = h[:, None]  # (b, 1, n, d)
    if d[0].shape[1] > 1:
        begins = _joined(d, s, h)  # (b, S, n, d)
    before = begins
    for factor, state in zip(d, s, strict=True):  # (b, S, n, d) each
        before = state.addcmul_(factor, before)  # (b, S, n, d)
    return decay, states


def _joined(d: tuple[Tensor, ...], s: tuple[Tensor, ...], h: Tensor) -> Tensor:
    """Return the state before each segment, (b, S, n, d); d, s: K times that; h (b, n, d)."""
    end, product = s[0].clone(), d[0].clone()  # (b, S, n, d)
    for factor, state in zip(d[1:], s[1:], strict=True):  # (b, S, n, d) each
        torch.addcmul(state, factor, end, out=end)  # (b, S, n, d)
        product *= factor  # (b, S, n, d)
    begins = torch.empty_like(end)  # (b, S, n, d)
    for i in range(end.shape[1]):
        begins[:, i] = h  # (b, n, d)
        h = torch.addcmul(end[:, i], product[:, i], h)  # (b, n, d)
    return begins


def _back(
    C: Tensor, dy: Tensor, decay: Tensor, inflow: Tensor, segment: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dL/dh[t] = C[t] dy[t] + decay[t+1] dL/dh[t+1]; decay becomes decay[t] dL/dh[t].

    C (b, c, n), dy (b, c, d), decay (b, c, n, d); `inflow` (b, n, d) is decay * dL/dh of the step
    after the chunk. The last result is the same for the step before the chunk.
    """
    g = C[..., None] * dy[:, :, None, :]  # (b, c, n, d), so far only what y gives back
    d, s = _fold(decay, segment), _fold(g, segment)  # K times (b, S, n, d)
    after = inflow[:, None]  # (b, 1, n, d)
    if d[0].shape[1] > 1:
        after = _joined_back(d, s, inflow)  # (b, S, n, d)
    for factor, gradient in zip(reversed(d), reversed(s), strict=True):  # (b, S, n, d) each
        gradient += after  # (b, S, n, d)
        after = factor.mul_(gradient)  # (b, S, n, d)
    return g, decay, after[:, 0].clone()  # the first segment's is the chunk's


def _joined_back(d: tuple[Tensor, ...], s: tuple[Tensor, ...], inflow: Tensor) -> Tensor:
    """Return what flows into the last step of each segment, (b, S, n, d); inflow is (b, n, d)."""
    out, product = d[-1] * s[-1], d[-1].clone()  # (b, S, n, d)
    for factor, gradient in zip(d[-2::-1], s[-2::-1], strict=True):  # (b, S, n, d) each
        out = out.add_(gradient).mul_(factor)  # (b, S, n, d)
        product *= factor  # (b, S, n, d)
    inflows = torch.empty_like(out)  # (b, S, n, d)
    for i in reversed(range(out.shape[1])):
        inflows[:, i] = inflow  # (b, n, d)
        inflow = torch.addcmul(out[:, i], product[:, i], inflow)  # (b, n, d)
    return inflows


def _fold(chunk: Tensor, segment: int) -> tuple[Tensor, ...]:
    """View (b, c, n, d) as K steps of S segments, (b, S, n, d) each.

    A chunk that cannot be cut into whole segments is a single one.
    """
    segments = chunk.shape[1] // segment if chunk.shape[1] % segment == 0 else 1
    return chunk.unflatten(1, (segments, -1)).unbind(2)  # K times (b, S, n, d)


def _fast(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    dt_bias: Tensor | None,
    documents: Documents | None,
) -> Tensor:
    """mamba-ssm's CUDA kernel, which has the length last and does not support documents.

    So the first step of a document is made so long that nothing is left of the state before it, and
    its x smaller in proportion. The skip D x and the gate are then computed by torch.
    """
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    def turned(one: Tensor | None) -> Tensor | None:
        return None if one is None else one.transpose(1, 2)  # (b, d or n, l)

    bias = None if dt_bias is None else dt_bias.float()  # (d,)
    u, step = x, dt  # (b, l, d) each
    if documents is not None:
        u, step = _forgetting(x, dt, A, bias, documents)  # (b, l, d) each
    y = selective_scan_fn(
        turned(u),
        turned(step),
        A.float(),
        turned(B),
        turned(C),
        D.float() if documents is None else None,
        z=turned(z) if documents is None else None,
        delta_bias=bias,
        delta_softplus=True,
    )  # (b, d, l)
    y = y.transpose(1, 2)  # (b, l, d)
    if documents is None:
        return y
    y = y + x * D.to(x.dtype)  # (b, l, d)
    return y if z is None else y * F.silu(z)  # (b, l, d)


def _forgetting(
    x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None, documents: Documents
) -> tuple[Tensor, Tensor]:
    """Return x and dt (b, l, d), changed to forget the state before where documents begin."""
    at, wide = documents.first, torch.promote_types(x.dtype, torch.float32)
    # A value for dt, in its dtype: the kernel adds the bias to it and takes the softplus.
    least = A.detach().abs().min().clamp(max=1)  # ()
    long = (FORGETS / least).to(dt.dtype)  # ()
    given, made = dt[at].to(wide), long.to(wide)  # (r, d), ()
    given, made = (given, made) if bias is None else (given + bias, made + bias)  # (r, d), (d,)
    share = softplus(given) / softplus(made)  # (r, d)
    small = (x[at].to(wide) * share).to(x.dtype)  # (r, d)
    return x.index_put(at, small), dt.index_put(at, long)  # (b, l, d) each


def _triton(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, *rest: Any
) -> Tensor:
    """Our own Triton kernels, which compute in float32."""
    from training.ops.gpu.scan import Scan

    z, dt_bias, documents = rest
    bias = None if dt_bias is None else dt_bias.float()  # (d,)
    y: Tensor = Scan.apply(x, dt, A.float(), B, C, D.float(), z, bias, documents)  # (b, l, d)
    return y


CHOICE = Choice(
    "selective_scan",
    [
        Implementation(
            name="triton", run=_triton, module="training.ops.gpu.scan", unfit=on_gpu_at_most_float32
        ),
        Implementation(name="mamba-ssm", run=_fast, module="mamba_ssm", unfit=on_gpu),
        Implementation(name="torch", run=_Scan.apply),
    ],
)
OF_PIECES = Choice("selective_scan", [Implementation(name="torch", run=_Scan.apply)], IN_PIECES)
