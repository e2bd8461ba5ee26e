"""Attention for a rank's piece of rows: its queries, with the keys and values of all pieces so far.

Keys and values, which grouped-query heads keep few, are gathered from the ranks of the context
group. Only the piece's own are saved for the backward pass, which gathers them again, recomputes
the attention, and sums over the ranks each one's gradients of every key. Any kernel can therefore
run, with a window, documents and pieces of any length, and memory per rank falls with the number
of ranks.

Shapes: b batch, l steps of the piece, m of the longest one, s positions up to the piece's end, h
heads of the queries, g of the keys, d channels of a head, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.ops.pieces import Piece

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of q (b, l, h, d) to keys and values (b, s, g, d), the last l of which match q."""


def attend(run: Attend, q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> Tensor:
    """Compute `run` with all keys and values up to the piece's end, (b, l, h, d).

    q (b, l, h, d), k and v (b, l, g, d) are the piece's own.
    """
    o: Tensor = _Attend.apply(q, k, v, piece, run)  # (b, l, h, d)
    return o


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, piece: Piece, run: Attend
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.how = piece, run
        return run(q, *_gathered(k, v, piece))  # (b, l, h, d)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v = ctx.saved_tensors
        piece, run = ctx.how
        seen = [one.detach().requires_grad_() for one in (q, *_gathered(k, v, piece))]
        with torch.enable_grad():
            o = run(*seen)  # (b, l, h, d)
        dq, dk, dv = torch.autograd.grad(o, seen, do)  # (b, l, h, d), (b, s, g, d) twice
        return dq, *_scattered(dk, dv, piece), None, None


def _gathered(k: Tensor, v: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
    """(b, l, g, d) twice -> (b, s, g, d) twice."""
    ranks, longest = piece.ranks, max(piece.lengths)
    both = torch.stack((k, v))  # (2, b, l, g, d)
    both = F.pad(both, (0, 0, 0, 0, 0, longest - k.shape[1])).contiguous()  # (2, b, m, g, d)
    all_of_them = both.new_empty(ranks.size, *both.shape)  # (N, 2, b, m, g, d)
    dist.all_gather_into_tensor(all_of_them.flatten(0, 1), both, group=ranks.group)
    parts = [
        all_of_them[index, :, :, :length]
        for index, length in enumerate(piece.lengths[: ranks.rank + 1])
    ]  # (2, b, a piece's steps, g, d) each
    keys, values = torch.cat(parts, dim=2)  # (b, s, g, d) twice
    return keys, values


def _scattered(dk: Tensor, dv: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
    """Return the sum over all ranks of the gradients of this rank's own keys and values.

    (b, s, g, d) twice -> (b, l, g, d) twice.
    """
    ranks, lengths = piece.ranks, piece.lengths
    both = torch.stack((dk, dv))  # (2, b, s, g, d)
    b, _, *heads = dk.shape
    sent = both.new_zeros(ranks.size, 2, b, max(lengths), *heads)  # (N, 2, b, m, g, d)
    for index, part in enumerate(both.split(lengths[: ranks.rank + 1], dim=2)):
        sent[index, :, :, : part.shape[2]] = part  # (2, b, a piece's steps, g, d)
    came = torch.empty_like(sent[0])  # (2, b, m, g, d)
    dist.reduce_scatter_tensor(came, sent.flatten(0, 1), group=ranks.group)
    own_dk, own_dv = came[:, :, : lengths[ranks.rank]]  # (b, l, g, d) twice
    return own_dk, own_dv
