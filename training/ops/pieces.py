"""Rows shared by the ranks of a context group: each has one contiguous piece of every row.

A rank computes only the positions of its piece, and receives from the others:

- the last inputs of a convolution, from the previous rank (`Piece.led`);
- the state of a recurrence before the piece. Each rank has the state that its own steps produce
  from zero, and the decay over all of them; the states before the pieces are the exclusive prefix
  of these pairs, found in ceil(log2 N) rounds (Hillis & Steele 1986, "Data Parallel Algorithms";
  the pairs are those of Blelloch 1990, "Prefix Sums and Their Applications", section 1.4).
  Gradients go the same way back, from the last rank to the first;
- keys and values, gathered from all ranks (training.ops.piece_attention).

Shapes: b batch, l steps of the piece, L of the whole row, k taps of a convolution, d channels, N
ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.errors import RequestError
from training.ops.documents import Documents, Seen

Faded = Callable[[Tensor, Tensor], Tensor]
"""Decays a state over a sum of step sizes, or of their exponents; keeps the state's shape."""


@dataclass(frozen=True, eq=False)
class ContextGroup:
    """A rank's place among those that share rows; the first one has their beginnings."""

    rank: int
    size: int
    group: Any  # a process group

    def piece(self, like: Tensor, seq_idx: Tensor | None) -> Piece:
        """Return this rank's piece of rows (b, L), cut evenly; seq_idx (b, L) is that of the rows.

        Raises RequestError, on all ranks, if there are more ranks than positions.
        """
        length = like.shape[1]
        if length < self.size:
            raise RequestError(
                f"context_parallel: {self.size} ranks cannot share a row of {length} tokens; "
                "fix: make seq_length larger, or context_parallel smaller"
            )
        ends = [(index + 1) * length // self.size for index in range(self.size)]
        return Piece.of_rows(self, ends, like, seq_idx)

    def total(self, x: Tensor) -> Tensor:
        """Sum over the ranks; all of them get the sum and compute with it."""
        summed: Tensor = _Total.apply(x, self)  # the shape of x
        return summed

    def before(self, state: Tensor, span: Tensor, faded: Faded, *, back: bool = False) -> Tensor:
        """Return the state before this rank's piece, given the `state` that its own steps produce.

        span: the span over which the piece decays a state; spans of adjacent pieces add up. back:
        go from the last rank to the first, as gradients do; the result is then what flows in from
        behind.
        """
        sign = -1 if back else 1
        found, passed = torch.zeros_like(state), torch.zeros_like(span)  # their shapes
        step = 1
        while step < self.size:
            both = torch.cat((span.to(state.dtype).flatten(), state.flatten()))  # (all numbers,)
            came = self.passed(both, sign * step)
            if came is not None:
                long, other = came.split([span.numel(), state.numel()])  # flat, both
                long, other = long.view_as(span).to(span.dtype), other.view_as(state)
                found = found + faded(other, passed)  # the shape of state
                state = state + faded(other, span)  # its own shape
                passed, span = passed + long, span + long  # the shape of span, both
            step *= 2
        return found

    def passed(self, x: Tensor, steps: int) -> Tensor | None:
        """Send a tensor `steps` ranks ahead; return what came from the other side, if anything."""
        came, calls = None, []
        if 0 <= self.rank + steps < self.size:
            calls.append(self._call(dist.isend, x.contiguous(), self.rank + steps))
        if 0 <= self.rank - steps < self.size:
            came = torch.empty_like(x, memory_format=torch.contiguous_format)  # the shape of x
            calls.append(self._call(dist.irecv, came, self.rank - steps))
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        return came

    def _call(self, what: Any, x: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(what, x, dist.get_global_rank(self.group, peer), self.group)


@dataclass(frozen=True, eq=False)
class Piece(Documents):
    """A rank's piece of rows, and the documents in it.

    seq_idx (b, l) is that of the piece. whole: the documents of the rows; None if each row is one.
    ends: where each rank's piece ends in the rows.
    """

    ranks: ContextGroup
    ends: tuple[int, ...]
    whole: Documents | None

    @classmethod
    def of_rows(
        cls, ranks: ContextGroup, ends: Sequence[int], like: Tensor, seq_idx: Tensor | None
    ) -> Piece:
        """Cut this rank's piece from rows (b, L); without seq_idx, each row is one document.

        ends: where each rank's piece ends in the rows.
        """
        start = ends[ranks.rank - 1] if ranks.rank else 0
        if seq_idx is None:
            none = torch.zeros(1, 1, dtype=torch.int32, device=like.device)  # (1, 1)
            own = none.expand(like.shape[0], ends[ranks.rank] - start)  # (b, l)
        else:
            own = seq_idx[:, start : ends[ranks.rank]]  # (b, l)
        return cls(own, ranks, tuple(ends), Documents.of(seq_idx))

    @property
    def start(self) -> int:
        """Where the piece begins in the rows."""
        return self.ends[self.ranks.rank - 1] if self.ranks.rank else 0

    @property
    def stop(self) -> int:
        """Where the piece ends in the rows."""
        return self.ends[self.ranks.rank]

    @property
    def lengths(self) -> list[int]:
        """Steps of every rank's piece."""
        return [stop - start for start, stop in pairwise((0, *self.ends))]

    @property
    def length(self) -> int:
        return self.ends[-1]

    def own(self, row: Tensor) -> Tensor:
        """(b, L, ...) -> (b, l, ...)."""
        return row[:, self.start : self.stop]  # (b, l, ...)

    @cached_property
    def begins(self) -> Tensor:
        """Where a document begins, (b, l), bool; that may be the piece's first position."""
        if self.whole is None:
            return torch.zeros_like(self.seq_idx, dtype=torch.bool)  # (b, l)
        return self.own(self.whole.begins)  # (b, l)

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token in its document, (b, l), or in the row (l,) if that is one.

        Both int64.
        """
        if self.whole is None:
            return torch.arange(self.start, self.stop, device=self.seq_idx.device)  # (l,)
        return self.own(self.whole.positions)  # (b, l)

    @cached_property
    def sight(self) -> Documents | None:
        """The documents of the rows up to the piece's end: all that its last position may see."""
        return None if self.whole is None else Documents(self.whole.seq_idx[:, : self.stop])

    def led(self, x: Tensor, steps: int) -> Tensor:
        """Prepend the last steps of the previous rank, (b, l, d) -> (b, steps + l, d).

        Zeros on the first rank. Raises RequestError, on all ranks, if a piece has fewer steps.
        """
        if min(self.lengths) < steps:
            raise RequestError(
                f"context_parallel: a piece of {min(self.lengths)} tokens is shorter than the "
                f"{steps} inputs that its convolution passes on; fix: make seq_length larger, or "
                "context_parallel smaller"
            )
        extended: Tensor = _Led.apply(x, self.ranks, steps)  # (b, steps + l, d)
        return extended

    def around(self, steps: int) -> Documents | None:
        """Return the documents of the piece and of the steps before it, (b, steps + l).

        Steps before the row count as part of its first document.
        """
        if self.whole is None:
            return None
        seq_idx = self.whole.seq_idx
        at = torch.arange(self.start - steps, self.stop, device=seq_idx.device)  # (steps + l,)
        found: Documents = self.once(
            ("around", steps), lambda: Documents(seq_idx[:, at.clamp(min=0)])
        )  # of (b, steps + l)
        return found

    def is_cut(self, first: int, stop: int) -> bool:
        return self.whole is not None and self.whole.is_cut(first + self.start, stop + self.start)

    def seen(self, cut: slice) -> Seen | None:
        if self.whole is None:
            return None
        return self.whole.seen(slice(cut.start + self.start, cut.stop + self.start))

    def begin_in(self, first: int, stop: int) -> list[tuple[int, int]]:
        if self.whole is None:
            return []
        return self.whole.begin_in(first + self.start, stop + self.start)

    def continues(self, cut: slice) -> Tensor | None:
        """Return which steps of a chunk share a document with the step before it.

        (b, c), bool; None if all do.
        """
        if not self.is_cut(cut.start - 1, cut.stop):
            return None
        assert self.whole is not None
        before = self.whole.seq_idx[:, max(self.start + cut.start - 1, 0), None]  # (b, 1)
        return self.seq_idx[:, cut] == before  # (b, c)

    def lasts(self, cut: slice) -> Tensor | None:
        """Return which steps of a chunk share a document with its last step; as in `continues`."""
        if not self.is_cut(cut.start - 1, cut.stop):
            return None
        own = self.seq_idx[:, cut]  # (b, c)
        return own == own[:, -1:]  # (b, c)

    def holds(self, tensor: Tensor) -> bool:
        parts = (self.whole, self.sight, *self._made.values())
        return super().holds(tensor) or any(
            one.holds(tensor) for one in parts if isinstance(one, Documents)
        )


class _Led(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: ContextGroup, steps: int) -> Tensor:  # type: ignore[override]
        ctx.how = ranks, steps
        came = ranks.passed(x[:, -steps:], 1)  # (b, steps, d)
        if came is None:
            came = x.new_zeros(x.shape[0], steps, x.shape[2])  # (b, steps, d)
        return torch.cat((came, x), dim=1)  # (b, steps + l, d)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ranks, steps = ctx.how
        dx = dy[:, steps:].clone()  # (b, l, d)
        came = ranks.passed(dy[:, :steps], -1)  # (b, steps, d)
        if came is not None:
            dx[:, -steps:] += came  # (b, steps, d)
        return dx, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: ContextGroup) -> Tensor:  # type: ignore[override]
        ctx.ranks = ranks
        total = x.clone(memory_format=torch.contiguous_format)  # the shape of x
        dist.all_reduce(total, group=ranks.group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        dx = dtotal.clone(memory_format=torch.contiguous_format)  # the shape of x
        dist.all_reduce(dx, group=ctx.ranks.group)
        return dx, None
