"""`text:GLOB`: plain files as bytes, with a vocabulary of 256.

The files that match, in sorted order, are one long text. It is cut into windows of seq_length + 1
bytes; each shares one byte with the next, so every byte but the first is predicted once.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from glob import iglob
from itertools import accumulate
from pathlib import Path

import torch

from training.data.base import Sample
from training.errors import RequestError, TrainingError

VOCABULARY = 256


class Text:
    """The windows of a text, as samples (see training.data.base).

    Raises RequestError if nothing matches or a file cannot be read.
    """

    vocab_size = VOCABULARY

    def __init__(self, pattern: str, seq_length: int) -> None:
        self.seq_length = seq_length
        self._paths, sizes = _files(pattern)
        self._ends = list(accumulate(sizes))
        names = "\n".join(
            f"{Path(p).name} {size}" for p, size in zip(self._paths, sizes, strict=True)
        )
        self.fingerprint = hashlib.blake2b(
            f"text {seq_length}\n{names}".encode(), digest_size=16
        ).hexdigest()

    def __len__(self) -> int:
        return max(0, self._ends[-1] - 1) // self.seq_length

    def __getitem__(self, index: int) -> Sample:
        text = self._read(index * self.seq_length, self.seq_length + 1)
        return Sample.of_text(torch.frombuffer(bytearray(text), dtype=torch.uint8))

    def told(self) -> str:
        return f"{self._ends[-1]:,} bytes in {len(self._paths)} files"

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
        raise RequestError("text: must be followed by a file name or pattern")
    found = sorted(path for path in iglob(pattern, recursive=True) if Path(path).is_file())  # noqa: PTH207
    if not found:
        raise RequestError(f"no file matches {pattern}")
    try:
        for path in found:
            with Path(path).open("rb"):
                pass
        sizes = [Path(path).stat().st_size for path in found]
    except OSError as error:
        raise RequestError(f"{error.filename} cannot be read: {error.strerror}") from error
    kept = [(path, size) for path, size in zip(found, sizes, strict=True) if size]
    if not kept:
        raise RequestError(f"the files that match {pattern} are empty")
    return [path for path, _ in kept], [size for _, size in kept]
