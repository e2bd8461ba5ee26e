"""Where documents begin in a batch, so that nothing leaks from one into the next.

Models take `seq_idx`, with the name and meaning that causal-conv1d and mamba-ssm give it.
Operations take `Documents`, which derives what they need from it, once a batch and on demand.

Shapes: b batch, l length, k taps of a convolution, c steps of a chunk, n documents of the batch,
r selected positions out of all (b l).
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
"""Exponent beyond which a decay is 0 in float32: e^-104 is below its smallest number."""


@dataclass(frozen=True)
class Seen:
    """Which steps of a chunk see each other, what came before, and the chunk's end: 1 or 0."""

    inside: Tensor  # (b, 1, c, c): step i and an earlier j, or i itself, share a document
    before: Tensor  # (b, 1, 1, c): a step shares a document with the step before the chunk
    until: Tensor  # (b, 1, 1, c): a step shares a document with the end of the chunk


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a batch: seq_idx (b, l), int32, numbers the document of each position.

    Numbers start at 0 in every row and go up by one where the next document begins.
    """

    seq_idx: Tensor

    @classmethod
    def of(cls, seq_idx: Tensor | None) -> Documents | None:
        """Wrap a model's seq_idx, which may be None."""
        return None if seq_idx is None else cls(seq_idx)

    @property
    def is_fixed(self) -> bool:
        """Whether shapes must not depend on where documents begin: XLA would recompile for each."""
        return self.seq_idx.device.type == "xla"

    @cached_property
    def begins(self) -> Tensor:
        """Where a document begins, (b, l), bool, except for the first of a row.

        The first needs no special care, as nothing comes before it.
        """
        return F.pad(self.seq_idx[:, 1:] != self.seq_idx[:, :-1], (1, 0))  # (b, l)

    @cached_property
    def first(self) -> tuple[Tensor, Tensor]:
        """The rows and steps where `begins` is true, (r,) each."""
        rows, steps = self.begins.nonzero(as_tuple=True)  # (r,) each
        return rows, steps

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token within its document, (b, l), int64."""
        at = torch.arange(self.seq_idx.shape[1], device=self.seq_idx.device)  # (l,)
        if self.is_fixed:  # XLA 2.7 cannot compile cummax; count the steps of earlier documents
            return at - (self.seq_idx[:, None] < self.seq_idx[..., None]).sum(2)  # (b, l)
        return at - torch.where(self.begins, at, 0).cummax(1).values  # (b, l)

    @property
    def length(self) -> int:
        """Positions of a row."""
        return self.seq_idx.shape[1]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Where each document begins in the concatenated rows, and the end, (n + 1,), int32."""
        starts = self.begins.clone()  # (b, l)
        starts[:, 0] = True
        found = starts.flatten().nonzero()[:, 0]  # (n,)
        return F.pad(found, (0, 1), value=starts.numel()).int()  # (n + 1,)

    def last_seqlens(self, last: int) -> Tensor:
        """Return `cu_seqlens`, (n + 1,), int32, for only the last positions of every row.

        A document that lies before them is empty.
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
        """Whether the position `step` steps back is in the same document, (b, l), bool."""
        return self.positions >= step  # (b, l)

    def before(self, step: int) -> Tensor:
        """Return the positions less than `step` into their documents, rows concatenated, (r,)."""
        return self.once(
            ("before", step), lambda: (self.positions.flatten() < step).nonzero()[:, 0]
        )

    def seen(self, cut: slice) -> Seen | None:
        """Return what a chunk's steps see; None if they and the step before share a document."""
        if not self.is_cut(cut.start - 1, cut.stop):
            return None
        return self.once(("seen", cut.start, cut.stop), lambda: self._look(cut))

    def begin_in(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return the row, and the step from `first`, of each document that begins in a chunk.

        Beginnings of rows are left out. The result is in host memory: there are few, and clearing a
        chunk's views of them one by one is faster than a single call with tensors of indices.
        """
        return self.once(("begin", first, stop), lambda: self._find_begins(first, stop))

    def is_cut(self, first: int, stop: int) -> bool:
        """Whether some row has more than one document in the positions from `first` to `stop`."""
        return self.is_fixed or any(row[max(first, 0)] != row[stop - 1] for row in self._rows)

    def first_key(self, at: int) -> int:
        """Return the first position that the queries from `at` on see, over all rows."""
        return min(self._first_keys[at])

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Make something for these documents, or return what was made before under this key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is cached here and thus shared by all blocks."""
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
        """The numbers in host memory: a GPU is waited for once a batch."""
        numbers: list[list[int]] = self.seq_idx.tolist()
        return numbers

    @cached_property
    def _first_keys(self) -> list[list[int]]:
        at = torch.arange(self.seq_idx.shape[1], device=self.seq_idx.device)  # (l,)
        keys: list[list[int]] = (at - self.positions).t().tolist()
        return keys
