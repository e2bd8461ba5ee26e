"""What is read: numbered samples of one length, and what one rank reads, of whatever kind it is.

A batch is part of a step, which takes `accumulation` of them; the rows of a batch, its sequences,
can be read by several processes, each the same rows of every batch.

Shapes: l sequence length, b sequences of a rank in a step, r rows that are read at once.
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
    """One sequence, or with a dimension b before, a batch of them.

    inputs (l): token ids, int64. targets (l): the token that follows each, -100 where none counts.
    weights (l): how much each target counts, float32; None where all count alike.
    seq_idx (l): the number of each input's document, int32, counted from 0; None where the data
    does not know where documents begin, or nobody asks.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor | None = None
    seq_idx: Tensor | None = None

    @classmethod
    def of_text(cls, tokens: Tensor) -> Sample:
        """Make a sample of l + 1 tokens that stand in a row, each the target of the one before."""
        tokens = tokens.long()  # (l + 1,)
        return cls(tokens[:-1], tokens[1:])  # (l,) each

    def to(self, device: torch.device) -> Sample:
        """Move it to a device; to a GPU without waiting for it.

        Where each row is one document seq_idx is left out, so that there is nothing to do for it;
        on XLA it stays, as a graph with it is another than one without.
        """
        weights = None if self.weights is None else _moved(self.weights, device)
        seq_idx = self.seq_idx
        if seq_idx is not None and (device.type == "xla" or bool(seq_idx[..., -1].any())):
            seq_idx = _moved(seq_idx, device)  # (l,)
        else:
            seq_idx = None
        return Sample(_moved(self.inputs, device), _moved(self.targets, device), weights, seq_idx)


class Samples(Protocol):
    """A set of samples. Raises RequestError when it is made, TrainingError when it is read.

    It can be pickled: the copy has all that was found of the files, and opens a file of its own
    when it first reads of it.
    """

    seq_length: int
    fingerprint: str
    """The same for the same samples in the same numbers, on every machine."""
    knows_documents: bool
    """Whether the samples have seq_idx, all of them."""

    @property
    def vocab_size(self) -> int:
        """Every token id is below this."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def described(self) -> str:
        """Say what there is, for messages: so many bytes in so many files."""

    def is_here(self) -> bool:
        """Tell whether the files are on this machine too, by one of each source."""


def stacked(samples: list[Sample]) -> Sample:
    """Make a batch, (b, l), of samples of which all have weights or none has, as of seq_idx."""
    weights = [one.weights for one in samples if one.weights is not None]
    documents = [one.seq_idx for one in samples if one.seq_idx is not None]
    return Sample(
        torch.stack([one.inputs for one in samples]),  # (b, l)
        torch.stack([one.targets for one in samples]),  # (b, l)
        torch.stack(weights) if weights else None,  # (b, l)
        torch.stack(documents) if documents else None,  # (b, l)
    )


def without_targets(sample: Sample) -> Sample:
    """Make a sample of which nothing counts."""
    return replace(sample, targets=torch.full_like(sample.targets, IGNORED))  # (l,)


def batched(samples: list[Sample], documents: bool) -> Sample:
    """Make a batch, (b, l), whose rows say of what documents they are, or do not."""
    rows = stacked(samples)
    return rows if documents else replace(rows, seq_idx=None)


def numbered(begins: Any) -> Tensor:
    """Number the documents of a sequence by whether one begins at a token, (l,) bool: (l,) int32.

    What the sequence begins with is number 0 in any case.
    """
    numbers = np.cumsum(begins, dtype=np.int32)  # (l,)
    return torch.from_numpy(numbers - numbers[:1])  # (l,)


def begun(ends: Sequence[int] | NDArray[np.int64], first: int, length: int) -> Tensor:
    """Number the documents of the tokens `first` ... of a line of documents, (l,) int32.

    ends: where in the line each document ends, rising.
    """
    begins = np.zeros(length, np.int32)  # (l,)
    at = bisect_right(ends, first)
    while at < len(ends) and ends[at] < first + length:
        begins[ends[at] - first] = 1
        at += 1
    return numbered(begins)  # (l,)


Gather = Callable[[Any], list[Any]]
"""Gives every rank the values of all, in the ranks' order (a collective call)."""


@dataclass(frozen=True)
class BatchPart:
    """Rows of a batch, (r, l).

    lanes: where each lane of a stream stands after them (see training.data.stream.feed). spent: all
    passes over the data have ended, so that nothing in the step of this batch counts.
    """

    rows: Sample
    lanes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    spent: bool = False


class DataFeed(Protocol):
    """What one rank reads; copy.copy gives one that goes on from the same place on its own."""

    fingerprint: str
    """The same on every rank, and wherever the same is read."""
    documents: bool
    """Whether rows have seq_idx, as the one who opens it decides; only where it knows documents."""
    batch_size: int
    accumulation: int
    position: int
    """Sequences of the whole run that were read, over all ranks."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def knows_documents(self) -> bool:
        """Whether it is known where each document begins."""

    @property
    def step_sequences(self) -> int:
        """Sequences of a step, over all ranks; rows of its last batch beyond them are empty."""

    @property
    def notes(self) -> Sequence[str]:
        """What the user should know of what is read."""

    def next_rows(self, rows: range) -> BatchPart:
        """Read these rows of the rank's next batch, and go on to the one after it."""

    def took(self, part: BatchPart) -> None:
        """Go on by a batch that a copy of this feed has read."""

    def rewind(self) -> None:
        """Go back to where a new run begins."""

    def state(self, gather: Gather) -> dict[str, Any]:
        """Tell where the reading stands, for a checkpoint (a collective call)."""

    def resume(self, state: dict[str, Any]) -> str | None:
        """Go on where a checkpoint stood; else tell why not, and what is read instead."""


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return tensor.to(device)  # its own shape
    return tensor.pin_memory().to(device, non_blocking=True)  # its own shape
