"""What one rank reads, of whatever kind the data is: a batch at a time, by one process or several.

A batch is part of a step, which takes `accumulation` of them; the rows of a batch, its sequences,
can be read by several processes, each the same rows of every batch.

Shapes: l sequence length, r rows that are read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from training.data.base import Sample

Gather = Callable[[Any], list[Any]]
"""Gives every rank the values of all, in the ranks' order (a collective call)."""


@dataclass(frozen=True)
class Part:
    """Rows of a batch, (r, l).

    lanes: where each lane of a stream stands after them (see training.data.stream). spent: all
    passes over the data have ended, so that nothing in the step of this batch counts.
    """

    rows: Sample
    lanes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    spent: bool = False


class Feed(Protocol):
    """What one rank reads; copy.copy gives one that goes on from the same place on its own."""

    fingerprint: str
    """The same on every rank, and wherever the same is read."""
    batch_size: int
    accumulation: int
    position: int
    """Sequences of the whole run that were read, over all ranks."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def global_batch(self) -> int: ...

    @property
    def notes(self) -> Sequence[str]:
        """What the user should know of what is read."""

    def next_rows(self, rows: range) -> Part:
        """Read these rows of the rank's next batch, and go on to the one after it."""

    def took(self, part: Part) -> None:
        """Go on by a batch that a copy of this feed has read."""

    def rewind(self) -> None:
        """Go back to where a new run begins."""

    def state(self, gather: Gather) -> dict[str, Any]:
        """Tell where the reading stands, for a checkpoint (a collective call)."""

    def resume(self, state: dict[str, Any]) -> str | None:
        """Go on where a checkpoint stood; else tell why not, and what is read instead."""
