"""Where documents begin in a batch, so that nothing of one is seen in the next.

The models take `seq_idx`, by the name and with the meaning that causal-conv1d and mamba-ssm have
for it; the operations take `Documents`, which has what they need of it, each made once a batch,
when it is first asked for.

Shapes: b batch, l length, k taps of a convolution, c steps of a chunk, n documents of the batch,
r some positions, of all (b l).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FORGETS = 104.0
"""A decay by so large an exponent is 0 in float32: e^-104 is below its least number."""


@dataclass(frozen=True)
class Seen:
    """What the steps of a chunk see, 1 or 0: of each other, of what was before, up to the end."""

    inside: Tensor  # (b, 1, c, c): step i and an earlier j, or itself, are of one document
    before: Tensor  # (b, 1, 1, c): a step is of the document that the step before the chunk is of
    until: Tensor  # (b, 1, 1, c): a step is of the document that the chunk ends with


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a batch: seq_idx (b, l), int32, is the number of each position's own.

    It counts from 0 in every row and goes up by one where the next document begins.
    """

    seq_idx: Tensor

    @classmethod
    def of(cls, seq_idx: Tensor | None) -> Documents | None:
        """Make them of what a model is given, which may be nothing."""
        return None if seq_idx is None else cls(seq_idx)

    @property
    def is_fixed(self) -> bool:
        """Whether shapes may not depend on where documents begin: XLA would compile each anew."""
        return self.seq_idx.device.type == "xla"

    @cached_property
    def begins(self) -> Tensor:
        """Where a document begins, (b, l), bool; but for the first of a row, before which is none.

        That one needs no care: it begins with nothing in any case.
        """
        return F.pad(self.seq_idx[:, 1:] != self.seq_idx[:, :-1], (1, 0))  # (b, l)

    @cached_property
    def first(self) -> tuple[Tensor, Tensor]:
        """The rows and steps where `begins` is true, (r,) each."""
        rows, steps = self.begins.nonzero(as_tuple=True)  # (r,) each
        return rows, steps

    @cached_property
    def positions(self) -> Tensor:
        """The place of each position in its document, (b, l), int64."""
        at = torch.arange(self.seq_idx.shape[1], device=self.seq_idx.device)  # (l,)
        if self.is_fixed:  # XLA 2.7 fails to compile cummax; a document begins after all before it
            return at - (self.seq_idx[:, None] < self.seq_idx[..., None]).sum(2)  # (b, l)
        return at - torch.where(self.begins, at, 0).cummax(1).values  # (b, l)

    @property
    def length(self) -> int:
        """Positions of a row."""
        return self.seq_idx.shape[1]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Where each document begins in all rows in a line, and the end, (n + 1,), int32."""
        starts = self.begins.clone()  # (b, l)
        starts[:, 0] = True
        found = starts.flatten().nonzero()[:, 0]  # (n,)
        return F.pad(found, (0, 1), value=starts.numel()).int()  # (n + 1,)

    def last_seqlens(self, last: int) -> Tensor:
        """Where each document ends if only so many last positions are left of every row.

        (n + 1,), int32, as `cu_seqlens`; one that lies before them is empty.
        """
        if last == self.length:
            return self.cu_seqlens  # (n + 1,)
        ends = self.cu_seqlens[1:] - 1  # (n,): the last position of each
        rows, at = ends // self.length, ends % self.length  # (n,) both
        left = rows * last + (at + 1 - (self.length - last)).clamp(min=0)  # (n,)
        return F.pad(left, (1, 0)).int()  # (n + 1,)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.cu_seqlens.diff().max())

    def same(self, step: int) -> Tensor:
        """Whether a position so many steps before is of the same document, (b, l), bool."""
        return self.positions >= step  # (b, l)

    def before(self, step: int) -> Tensor:
        """The positions of fewer steps than this in their documents, all rows in a line, (r,)."""
        return self.once(
            ("before", step), lambda: (self.positions.flatten() < step).nonzero()[:, 0]
        )

    def seen(self, cut: slice) -> Seen | None:
        """What the steps of a chunk see; None where all of it, and what is before, is one's."""
        if not self.is_cut(cut.start - 1, cut.stop):
            return None
        return self.once(("seen", cut.start, cut.stop), lambda: self._look(cut))

    def begin_in(self, first: int, stop: int) -> list[tuple[int, int]]:
        """The row and the step, counted from `first`, of each document that begins in a chunk.

        But for those that begin a row. In the host's memory: they are few, so that a chunk clears
        its own views of them in less time than one call takes that is given tensors of places.
        """
        return self.once(("begin", first, stop), lambda: self._find_begins(first, stop))

    def is_cut(self, first: int, stop: int) -> bool:
        """Whether some row's positions from `first` up to `stop` are not of one document."""
        return self.is_fixed or any(row[max(first, 0)] != row[stop - 1] for row in self._rows)

    def first_key(self, at: int) -> int:
        """The first position that a query at `at`, or one after it, of any row sees."""
        return min(self._first_keys[at])

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Make something of these documents, or give what was made under this key before."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is one that was made here, which is every block's alike."""
        made = (one for one in self._made.values() if isinstance(one, Tensor))
        return any(tensor.data_ptr() == one.data_ptr() for one in made)

    def _find_begins(self, first: int, stop: int) -> list[tuple[int, int]]:
        return [
            (number, step - first)
            for number, row in enumerate(self._rows)
            for step in range(max(first, 1), stop)
            if row[step] != row[step - 1]
        ]

    def _look(self, cut: slice) -> Seen:
        own = self.seq_idx[:, cut]  # (b, c)
        inside = (own[:, :, None] == own[:, None, :]).float().tril_()  # (b, c, c)
        before = self.seq_idx[:, max(cut.start - 1, 0), None]  # (b, 1)
        return Seen(
            inside=inside[:, None],  # (b, 1, c, c)
            before=(own == before).float()[:, None, None],  # (b, 1, 1, c)
            until=inside[:, None, -1:],  # (b, 1, 1, c)
        )

    @cached_property
    def _made(self) -> dict[tuple[Any, ...], Any]:
        return {}

    @cached_property
    def _rows(self) -> list[list[int]]:
        """The numbers in the host's memory: a GPU is waited for once a batch."""
        numbers: list[list[int]] = self.seq_idx.tolist()
        return numbers

    @cached_property
    def _first_keys(self) -> list[list[int]]:
        at = torch.arange(self.seq_idx.shape[1], device=self.seq_idx.device)  # (l,)
        keys: list[list[int]] = (at - self.positions).t().tolist()
        return keys
