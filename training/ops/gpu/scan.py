"""Selective scan on a GPU: Triton kernels that take (b, l, d) as it is and support documents.

The equations are those of training.ops.scan. All chunks of steps run in parallel:

    ends       every chunk from a state of zero: its last state, and the sum of its deltas
    across     from chunk to chunk: the state at the start of each
    outputs    every chunk again, from the state at its start: y

and for the gradients, with what the steps after a chunk pass back to its last state:

    back       every chunk from its end to its start, as if nothing came after it
    across     from chunk to chunk, the last one first
    gradients  every chunk, with what comes from both sides

The last one needs the states in reverse, and recomputes them from every HELD-th. Nothing is summed
by atomic operations, so equal inputs give bitwise equal results. Where a document begins, the decay
is 0, so nothing passes, forward or backward.

Shapes: b batch, l length, d channels, n state size, k chunks.
"""

# ruff: noqa: N803, N806  (A, B, C, D are the paper's own names)
from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.ops.documents import Documents
from training.ops.gpu import scan_kernels as kernels

CHUNK = 64
"""Steps of a chunk: more chunks fill the GPU better, but each costs the traffic of one state."""

CHANNELS = 32
"""Channels of a program: as many as a warp has threads."""

STEPS = 4
"""Steps that a program reads before it computes them; divides CHUNK."""

HELD = 2
"""The same for `gradients`, which holds the states of that many steps in registers."""

REGISTERS = 168
"""Registers per thread of `gradients`. With fewer some values go to memory, with more too few warps
run. This and the numbers above were fastest on an H200, in bfloat16 with 2048 and 5120 channels."""

ACROSS = {"SIZE": 128, "AHEAD": 8}
"""States per program of `across`, and chunks that it reads ahead."""


class _Sizes:
    """The sizes, the grid and the constants that the kernels are launched with."""

    def __init__(self, x: Tensor, A: Tensor, documents: Documents | None) -> None:
        self.b, self.l, self.d = x.shape
        self.n = A.shape[1]
        self.chunks = triton.cdiv(self.l, CHUNK)
        self.parts = triton.cdiv(self.d, CHANNELS)
        self.grid = (self.parts, self.chunks, self.b)
        self.constants = {
            "D": self.d,
            "N": self.n,
            "NP": triton.next_power_of_2(self.n),
            "CHANNELS": CHANNELS,
            "CHUNK": CHUNK,
            "EVEN": self.l % CHUNK == 0,
            "DOCUMENTS": documents is not None,
            "num_warps": 1,
        }

    def across(self, A: Tensor, states: Tensor, sums: Tensor, *, back: bool) -> None:
        grid = (triton.cdiv(self.d * self.n, ACROSS["SIZE"]), self.b)
        how = {**ACROSS, "D": self.d, "N": self.n, "BACK": back, "num_warps": 1}
        kernels.across[grid](A, states, sums, self.chunks, **how)


def _rows(one: Tensor) -> Tensor:
    """Return the tensor itself if its channels are contiguous, else a copy."""
    return one if one.stride(-1) == 1 else one.contiguous()


def _strides(*given: Tensor) -> list[int]:
    """Return the stride between rows of each tensor, then the stride between steps of each."""
    return [one.stride(axis) for axis in (0, 1) for one in given]


class Scan(torch.autograd.Function):
    """`selective_scan` by these kernels; A, D and dt_bias are float32."""

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
        ctx.documents, ctx.has_bias, ctx.gated = documents, dt_bias is not None, z is not None
        sizes = _Sizes(x, A, documents)
        x, dt, B, C = _rows(x), _rows(dt), _rows(B), _rows(C)
        gate = x if z is None else _rows(z)  # (b, l, d); not read without a gate
        bias = A.new_zeros(sizes.d) if dt_bias is None else dt_bias  # (d,)
        begins = x if documents is None else documents.begins.to(torch.int8)  # (b, l)
        A, D, bias = A.contiguous(), D.contiguous(), bias.contiguous()
        starts = A.new_empty(sizes.b, sizes.chunks, sizes.d, sizes.n)  # (b, k, d, n)
        sums = A.new_empty(sizes.b, sizes.chunks, sizes.d)  # (b, k, d)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)  # (b, l, d)
        kernels.ends[sizes.grid](
            *(x, dt, A, B, bias, begins, starts, sums, sizes.l, sizes.chunks),
            *_strides(x, dt, B),
            **sizes.constants,
            STEPS=STEPS,
        )
        sizes.across(A, starts, sums, back=False)
        kernels.outputs[sizes.grid](
            *(x, dt, A, B, C, D, gate, bias, begins, starts, y, sizes.l, sizes.chunks),
            *_strides(x, dt, B, C, gate),
            **sizes.constants,
            STEPS=STEPS,
            GATED=ctx.gated,
        )
        ctx.save_for_backward(x, dt, A, B, C, D, gate, bias, begins, starts, sums)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, dt, A, B, C, D, gate, bias, begins, starts, sums = ctx.saved_tensors
        sizes, dy = _Sizes(x, A, ctx.documents), _rows(dy)
        flows = torch.empty_like(starts)  # (b, k, d, n)
        kernels.back[sizes.grid](
            *(dt, A, C, gate, bias, begins, dy, flows, sizes.l, sizes.chunks),
            *_strides(dt, C, gate, dy),
            **sizes.constants,
            STEPS=STEPS,
            GATED=ctx.gated,
        )
        sizes.across(A, flows, sums, back=True)
        b, k, d, n = starts.shape
        between = starts.new_empty(b, k, CHUNK // HELD, d, n)  # (b, k, c, d, n)
        dx, ddt = (torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (x, dt))
        dz = torch.empty_like(dx, dtype=gate.dtype) if ctx.gated else dx  # (b, l, d)
        dB, dC = (starts.new_empty(sizes.parts, b, sizes.l, n) for _ in range(2))
        dA, dD, dbias = torch.empty_like(starts), torch.empty_like(sums), torch.empty_like(sums)
        kernels.gradients[sizes.grid](
            *(x, dt, A, B, C, D, gate, bias, begins, starts, flows, between, dy),
            *(dx, ddt, dz, dB, dC, dA, dD, dbias, sizes.l, sizes.chunks),
            *_strides(x, dt, B, C, gate, dy),
            **sizes.constants,
            STEPS=HELD,
            GATED=ctx.gated,
            maxnreg=REGISTERS,
        )
        return (
            dx,
            ddt,
            dA.sum((0, 1)),  # (d, n)
            dB.sum(0).to(B.dtype),  # (b, l, n)
            dC.sum(0).to(C.dtype),  # (b, l, n)
            dD.sum((0, 1)),  # (d,)
            dz if ctx.gated else None,
            dbias.sum((0, 1)) if ctx.has_bias else None,  # (d,)
            None,
        )
