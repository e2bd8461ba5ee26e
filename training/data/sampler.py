"""The order in which samples are read: one for all ranks, each of which reads its own part of it.

Step s reads samples s * G ... (s + 1) * G - 1 of the order, G being the global batch, so the number
of ranks only changes which rank reads what. Every sample is read once per epoch; the order is
shuffled anew for each epoch, or is that of the samples' numbers. A shuffled order needs no list:
each place is computed by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from training.data.base import BatchPart, Gather, Sample, Samples, batched, without_targets
from training.errors import RequestError

ROUNDS = 4

OTHER_DATA = (
    "the data, or a setting that cuts or orders it, is not that of the checkpoint; it is read "
    "from its beginning"
)


def shuffled(place: int, count: int, key: str) -> int:
    """Return what stands at `place` in the permutation of 0 ... count - 1 that a key selects.

    A Feistel network over the smallest even number of bits that holds count - 1 (Luby & Rackoff
    1988: four rounds), repeated until the result is below `count` (Black & Rogaway 2002, cycle
    walking).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (_mix(key, turn, right) & mask)
        place = left << half | right
        if place < count:
            return place


def _mix(key: str, turn: int, value: int) -> int:
    digest = hashlib.blake2b(f"{key}/{turn}/{value}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class Reader:
    """One rank's feed of numbered samples, a DataFeed (see training.data.base).

    The first `skip` samples of the order are left out. With `epochs`, reading ends before the first
    step that would need more samples than that many epochs have.

    step_sequences: sequences per step over all ranks, if its batches have more rows than that; 0
    for as many as they have rows.

    to_the_end: reading ends after the last sample of the epochs, and the rows beyond it are empty.

    Raises RequestError if there are fewer samples than a batch of all ranks takes or, with
    `epochs`, fewer than one step takes; with `to_the_end`, only if there are none.
    """

    documents = False

    def __init__(
        self,
        samples: Samples,
        *,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        accumulation: int = 1,
        step_sequences: int = 0,
        shuffle: bool = True,
        skip: int = 0,
        epochs: int = 0,
        to_the_end: bool = False,
        setting: str = "dataset_path",
    ) -> None:
        self.samples, self.batch_size, self.shuffle = samples, batch_size, shuffle
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.accumulation = accumulation
        self.step_sequences = step_sequences or self._at_once * accumulation
        self._end, self._to_the_end = epochs * len(samples), to_the_end
        self._begin = self._skip = self.position = skip
        if len(samples) < (1 if to_the_end else min(self._at_once, self.step_sequences)):
            raise RequestError(
                f"{setting}: has {samples.described()}, which make {len(samples):,} samples of "
                f"seq_length {samples.seq_length}; "
                + (
                    "an evaluation needs one"
                    if to_the_end
                    else f"one step needs {self._at_once:,} (batch_size {batch_size} x "
                    f"{world_size} ranks)"
                )
            )
        if epochs and not to_the_end and self._end < skip + self.step_sequences:
            raise RequestError(
                f"epochs: {epochs} pass{'es' if epochs > 1 else ''} over {len(samples):,} samples "
                f"{'are' if epochs > 1 else 'is'} less than one step, which takes "
                f"{self.step_sequences:,}"
                + (f", after the {skip:,} that are left out" if skip else "")
            )
        order = f"{seed}" if shuffle else "in order"
        self.fingerprint = hashlib.blake2b(
            f"{samples.fingerprint} {order}".encode(), digest_size=16
        ).hexdigest()

    @property
    def vocab_size(self) -> int:
        return self.samples.vocab_size

    @property
    def knows_documents(self) -> bool:
        return self.samples.knows_documents

    @property
    def notes(self) -> Sequence[str]:
        return getattr(self.samples, "notes", ())

    def next_rows(self, rows: range) -> BatchPart:
        """Read these rows of the rank's next batch, and move on to the batch after it."""
        first = self.rank * self.batch_size
        read = [self._sample(first + row) for row in rows]
        part = BatchPart(batched(read, self.documents), spent=self._is_spent())
        self.took(part)
        return part

    def next_batch(self) -> Sample:
        """Read this rank's next batch, (batch_size, seq_length)."""
        return self.next_rows(range(self.batch_size)).rows

    def took(self, part: BatchPart) -> None:
        self.position += min(self._at_once, self._left)

    def rewind(self) -> None:
        self._begin = self.position = self._skip

    def state(self, gather: Gather | None = None) -> dict[str, Any]:
        """Return the position for a checkpoint, which every rank knows by itself."""
        epoch, position = divmod(self.position, len(self.samples))
        return {"epoch": epoch, "position": position, "fingerprint": self.fingerprint}

    def resume(self, state: dict[str, Any]) -> str | None:
        """Continue where a checkpoint stood; if it read other data, say so and do nothing."""
        if state["fingerprint"] != self.fingerprint:
            return OTHER_DATA
        self._begin = self.position = state["epoch"] * len(self.samples) + state["position"]
        return None

    @property
    def _at_once(self) -> int:
        """Sequences in a batch of all ranks."""
        return self.batch_size * self.world_size

    @property
    def _left(self) -> int:
        """Unread sequences of the step that the next batch is part of."""
        return self.step_sequences - (self.position - self._begin) % self.step_sequences

    def _is_spent(self) -> bool:
        """Return whether the step of the next batch would go beyond the last epoch.

        With `to_the_end`, return whether nothing is left.
        """
        if self._to_the_end:
            return self.position >= self._end
        return bool(self._end) and self.position + self._left > self._end

    def _sample(self, place: int) -> Sample:
        """Read the sample at a place of the next batch; beyond step or end, no target counts."""
        is_beyond = self._to_the_end and self.position + place >= self._end
        if place < self._left and not is_beyond:
            return self.samples[self._number(self.position + place)]
        return without_targets(self.samples[self._number(self.position)])

    def _number(self, place: int) -> int:
        """Return the number of the sample at a place of the order."""
        epoch, place = divmod(place, len(self.samples))
        return shuffled(place, len(self.samples), f"{self.seed}/{epoch}") if self.shuffle else place
