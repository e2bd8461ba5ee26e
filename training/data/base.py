"""The interfaces of all kinds of data: numbered samples of one length, and the feed of one rank.

A step consists of `accumulation` batches. The rows of a batch (its sequences) can be read by
several processes, each of which reads the same rows of every batch.

Shapes: l sequence length, b sequences in a rank's batch, r rows that are read at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.ops.loss import IGNORED


@dataclass(frozen=True)
class Sample:
    """One sequence or, with a leading dimension b, a batch of them.

    inputs (l): token ids, int64. targets (l): the token after each input, -100 where none counts.
    weights (l): how much each target counts, float32; None if all count alike.
    seq_idx (l): the number of each input's document, int32, counted from 0; None if the data does
    not know where documents begin, or if it is not asked for.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor | None = None
    seq_idx: Tensor | None = None

    @classmethod
    def of_text(cls, tokens: Tensor) -> Sample:
        """Make a sample of l + 1 consecutive tokens, each the target of the one before it."""
        tokens = tokens.long()  # (l + 1,)
        return cls(tokens[:-1], tokens[1:])  # (l,) each

    def to(self, device: torch.device) -> Sample:
        """Copy it to a device; to a GPU, without waiting for the copy.

        If each row is a single document, seq_idx is dropped, so that models do no work for it. On
        XLA it is kept, as a graph without it would be a different graph.
        """
        weights = None if self.weights is None else _moved(self.weights, device)
        seq_idx = self.seq_idx
        if seq_idx is not None and (device.type == "xla" or bool(seq_idx[..., -1].any())):
            seq_idx = _moved(seq_idx, device)  # (l,)
        else:
            seq_idx = None
        return Sample(_moved(self.inputs, device), _moved(self.targets, device), weights, seq_idx)


class Samples(Protocol):
    """Numbered samples. Creating them raises RequestError, reading them TrainingError.

    They can be pickled: the copy keeps all that was found out about the files, and opens each file
    itself on its first read.
    """

    seq_length: int
    fingerprint: str
    """Identical on every machine for the same samples with the same numbers."""
    knows_documents: bool
    """Whether all samples have seq_idx."""

    @property
    def vocab_size(self) -> int:
        """A bound that every token id is below."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def described(self) -> str:
        """Describe the data for messages, such as how many bytes in how many files."""

    def is_here(self) -> bool:
        """Return whether this machine has the files too, judged by one file of each source."""


def stacked(samples: list[Sample]) -> Sample:
    """Stack samples into a batch, (b, l); all of them have weights or none has, and so seq_idx."""
    weights = [one.weights for one in samples if one.weights is not None]
    documents = [one.seq_idx for one in samples if one.seq_idx is not None]
    return Sample(
        torch.stack([one.inputs for one in samples]),  # (b, l)
        torch.stack([one.targets for one in samples]),  # (b, l)
        torch.stack(weights) if weights else None,  # (b, l)
        torch.stack(documents) if documents else None,  # (b, l)
    )


def without_targets(sample: Sample) -> Sample:
    """Return a copy of a sample in which no target counts."""
    return replace(sample, targets=torch.full_like(sample.targets, IGNORED))  # (l,)


def batched(samples: list[Sample], documents: bool) -> Sample:
    """Stack samples into a batch, (b, l), without seq_idx unless `documents`."""
    rows = stacked(samples)
    return rows if documents else replace(rows, seq_idx=None)


def numbered(begins: Any) -> Tensor:
    """Return the document number of each token, (l,) int32, given where documents begin, (l,) bool.

    The first token is in document 0 in any case.
    """
    numbers = np.cumsum(begins, dtype=np.int32)  # (l,)
    return torch.from_numpy(numbers - numbers[:1])  # (l,)


def begun(ends: Sequence[int] | NDArray[np.int64], first: int, length: int) -> Tensor:
    """Return the document numbers, (l,) int32, of `length` tokens from number `first` on.

    ends: where each document ends in the concatenated documents, ascending.
    """
    begins = np.zeros(length, np.int32)  # (l,)
    at = bisect_right(ends, first)
    while at < len(ends) and ends[at] < first + length:
        begins[ends[at] - first] = 1
        at += 1
    return numbered(begins)  # (l,)


Gather = Callable[[Any], list[Any]]
"""Returns the values of all ranks on every rank, in rank order (a collective call)."""


@dataclass(frozen=True)
class BatchPart:
    """Rows of a batch, (r, l).

    lanes: the place of each lane of a stream after these rows (see training.data.stream.feed).
    spent: all passes over the data have ended, so nothing in these rows counts.
    """

    rows: Sample
    lanes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    spent: bool = False


class DataFeed(Protocol):
    """The batches of one rank; copy.copy gives an independent feed at the same position."""

    fingerprint: str
    """Identical on every rank, and wherever the same data is read in the same order."""
    documents: bool
    """Whether rows have seq_idx: set by whoever opens the feed, if it knows documents."""
    batch_size: int
    accumulation: int
    position: int
    """Sequences that the whole run has read so far, over all ranks."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def knows_documents(self) -> bool:
        """Whether it is known where each document begins."""

    @property
    def step_sequences(self) -> int:
        """Sequences per step, over all ranks; rows of its last batch beyond them are empty."""

    @property
    def notes(self) -> Sequence[str]:
        """What the user should know about the data."""

    def next_rows(self, rows: range) -> BatchPart:
        """Read these rows of the rank's next batch, and move on to the batch after it."""

    def took(self, part: BatchPart) -> None:
        """Advance by a batch that a copy of this feed has read."""

    def rewind(self) -> None:
        """Go back to where a new run begins."""

    def state(self, gather: Gather) -> dict[str, Any]:
        """Return the position for a checkpoint (a collective call)."""

    def resume(self, state: dict[str, Any]) -> str | None:
        """Continue where a checkpoint stood, or return why not, and what is read instead."""


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return tensor.to(device)  # its own shape
    return tensor.pin_memory().to(device, non_blocking=True)  # its own shape
