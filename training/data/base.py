"""What is read: samples that are numbered, of one length, the same on every rank.

Shapes: l sequence length, b sequences of a rank in a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One sequence, or with a dimension b before, a batch of them.

    inputs (l): token ids, int64. targets (l): the token that follows each, -100 where none counts.
    weights (l): how much each target counts, float32; None where all count alike.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor | None = None

    @classmethod
    def of_text(cls, tokens: Tensor) -> Sample:
        """Make a sample of l + 1 tokens that stand in a row, each the target of the one before."""
        tokens = tokens.long()  # (l + 1,)
        return cls(tokens[:-1], tokens[1:])  # (l,) each

    def to(self, device: torch.device) -> Sample:
        """Move it to a device; to a GPU without waiting for it."""
        weights = None if self.weights is None else _moved(self.weights, device)
        return Sample(_moved(self.inputs, device), _moved(self.targets, device), weights)


class Samples(Protocol):
    """A set of samples. Raises RequestError when it is made, TrainingError when it is read."""

    seq_length: int
    fingerprint: str
    """The same for the same samples in the same numbers, on every machine."""

    @property
    def vocab_size(self) -> int:
        """Every token id is below this."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def told(self) -> str:
        """Say what there is, for messages: so many bytes in so many files."""


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return tensor.to(device)  # its own shape
    return tensor.pin_memory().to(device, non_blocking=True)  # its own shape


def stacked(samples: list[Sample]) -> Sample:
    """Make a batch, (b, l), of samples that all have weights or all have none."""
    weights = [one.weights for one in samples if one.weights is not None]
    return Sample(
        torch.stack([one.inputs for one in samples]),  # (b, l)
        torch.stack([one.targets for one in samples]),  # (b, l)
        torch.stack(weights) if weights else None,  # (b, l)
    )
