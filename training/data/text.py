"""`text:GLOB`: plain files as bytes, with a vocabulary of 256.

The files that match, in sorted order, are one long text. It is cut into windows of seq_length + 1
bytes (each shares one byte with the next, so every byte but the first is predicted once), and the
windows are read in an order that is shuffled anew each epoch. The order is one for all ranks: step
s takes the windows s * G ... (s + 1) * G - 1 of it, G being the global batch, so the number of
ranks changes nothing but who reads what.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from glob import iglob
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.data.order import shuffled
from training.errors import RequestError, TrainingError

PREFIX = "text:"
VOCABULARY = 256


class TextData:
    """The windows of one rank. `position` counts windows of the whole run, over all ranks.

    Raises RequestError if nothing matches, a file cannot be read, or the text is shorter than one
    global batch.
    """

    def __init__(
        self,
        dataset_path: str,
        *,
        seq_length: int,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.seq_length, self.batch_size, self.seed = seq_length, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.position = 0
        self._pattern = dataset_path.removeprefix(PREFIX)
        self._paths, sizes = _files(self._pattern)
        self._ends = list(accumulate(sizes))
        self.windows = max(0, self._ends[-1] - 1) // seq_length
        if self.windows < self.global_batch:
            raise RequestError(
                f"dataset_path: {dataset_path} has {self._ends[-1]:,} bytes in {len(sizes)} files; "
                f"one step needs {self.global_batch * seq_length + 1:,} (seq_length {seq_length} x "
                f"batch_size {batch_size} x {world_size} ranks + 1)"
            )
        names = "\n".join(
            f"{Path(p).name} {size}" for p, size in zip(self._paths, sizes, strict=True)
        )
        self.fingerprint = hashlib.blake2b(
            f"{seq_length} {seed}\n{names}".encode(), digest_size=16
        ).hexdigest()

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.world_size

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Read inputs and the bytes that follow them, both (batch_size, seq_length) int64."""
        first = self.position + self.rank * self.batch_size
        rows = [self._window(first + i) for i in range(self.batch_size)]
        self.position += self.global_batch
        window = torch.stack(rows).long()  # (batch_size, seq_length + 1)
        return window[:, :-1], window[:, 1:]  # (batch_size, seq_length) each

    def state(self) -> dict[str, Any]:
        """Tell where the reading stands, for a checkpoint."""
        return {
            "epoch": self.position // self.windows,
            "position": self.position % self.windows,
            "fingerprint": self.fingerprint,
        }

    def resume(self, state: dict[str, Any]) -> bool:
        """Go on where a checkpoint stood; False, and nothing done, if it read other data."""
        if state["fingerprint"] != self.fingerprint:
            return False
        self.position = state["epoch"] * self.windows + state["position"]
        return True

    def _window(self, number: int) -> Tensor:
        """Read the window that the shuffled order has at `number`: (seq_length + 1,) uint8."""
        epoch, place = divmod(number, self.windows)
        begin = shuffled(place, self.windows, f"{self.seed}/{epoch}") * self.seq_length
        text = self._read(begin, self.seq_length + 1)
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)  # (seq_length + 1,)

    def _read(self, begin: int, length: int) -> bytes:
        pieces = []
        index = bisect_right(self._ends, begin)
        while length:
            end = self._ends[index]
            size = end - (self._ends[index - 1] if index else 0)
            take = min(length, end - begin)
            path = self._paths[index]
            try:
                with Path(path).open("rb") as file:
                    file.seek(size - (end - begin))
                    piece = file.read(take)
            except OSError as error:
                raise TrainingError(
                    f"{path}: cannot be read: {error.strerror}", local=True
                ) from error
            if len(piece) < take:
                raise TrainingError(f"{path}: became shorter while it was read", local=True)
            pieces.append(piece)
            begin, length, index = begin + take, length - take, index + 1
        return b"".join(pieces)


def _files(pattern: str) -> tuple[list[str], list[int]]:
    """Paths and sizes of the files that match, sorted, the empty ones left out."""
    if not pattern:
        raise RequestError("dataset_path: text: must be followed by a file name or pattern")
    found = sorted(path for path in iglob(pattern, recursive=True) if Path(path).is_file())  # noqa: PTH207
    if not found:
        raise RequestError(f"dataset_path: no file matches {pattern}")
    try:
        for path in found:
            with Path(path).open("rb"):
                pass
        sizes = [Path(path).stat().st_size for path in found]
    except OSError as error:
        raise RequestError(
            f"dataset_path: {error.filename} cannot be read: {error.strerror}"
        ) from error
    kept = [(path, size) for path, size in zip(found, sizes, strict=True) if size]
    if not kept:
        raise RequestError(f"dataset_path: the files that match {pattern} are empty")
    return [path for path, _ in kept], [size for _, size in kept]
