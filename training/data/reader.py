"""The order in which samples are read: one for all ranks, each of which reads its own part of it.

Step s takes the samples s * G ... (s + 1) * G - 1 of the order, G being the global batch, so the
number of ranks changes nothing but who reads what. Every sample is read once in an epoch; the order
is shuffled anew each epoch, or is that of the samples' own numbers.
"""

from __future__ import annotations

import hashlib
from typing import Any

from training.data.order import shuffled
from training.data.samples import Sample, Samples, stacked
from training.errors import RequestError


class Reader:
    """What one rank reads. `position` counts samples of the whole run, over all ranks.

    Raises RequestError if there are fewer samples than one global batch.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        shuffle: bool = True,
        skip: int = 0,
        setting: str = "dataset_path",
    ) -> None:
        self.samples, self.batch_size, self.shuffle = samples, batch_size, shuffle
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.position = skip
        if len(samples) < self.global_batch:
            raise RequestError(
                f"{setting}: has {samples.told()}, which make {len(samples):,} samples of "
                f"seq_length {samples.seq_length}; one step needs {self.global_batch:,} "
                f"(batch_size {batch_size} x {world_size} ranks)"
            )
        order = f"{seed}" if shuffle else "in order"
        self.fingerprint = hashlib.blake2b(
            f"{samples.fingerprint} {order}".encode(), digest_size=16
        ).hexdigest()

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.world_size

    def next_batch(self) -> Sample:
        """Read this rank's part of the next step, (batch_size, seq_length)."""
        first = self.position + self.rank * self.batch_size
        rows = [self.samples[self._number(first + i)] for i in range(self.batch_size)]
        self.position += self.global_batch
        return stacked(rows)

    def state(self) -> dict[str, Any]:
        """Tell where the reading stands, for a checkpoint."""
        epoch, position = divmod(self.position, len(self.samples))
        return {"epoch": epoch, "position": position, "fingerprint": self.fingerprint}

    def resume(self, state: dict[str, Any]) -> bool:
        """Go on where a checkpoint stood; False, and nothing done, if it read other data."""
        if state["fingerprint"] != self.fingerprint:
            return False
        self.position = state["epoch"] * len(self.samples) + state["position"]
        return True

    def _number(self, place: int) -> int:
        """Find which sample stands at a place of the order."""
        epoch, place = divmod(place, len(self.samples))
        return shuffled(place, len(self.samples), f"{self.seed}/{epoch}") if self.shuffle else place
