"""Synthetic tokens, to try a model or a machine without data: drawn anew wherever they are read."""

from __future__ import annotations

import hashlib

import torch

from training.data.base import Sample
from training.errors import RequestError


class Synthetic:
    """Uniformly random tokens, as samples; each is a pure function of the seed and its number."""

    def __init__(
        self, seq_length: int, vocab_size: int, *, seed: int = 0, count: int = 100_000
    ) -> None:
        for name, value in (("vocab_size", vocab_size), ("count", count)):
            if value < 1:
                raise RequestError(f"synthetic data: {name} is {value}, must be at least 1")
        self.seq_length, self.vocab_size = seq_length, vocab_size
        self._seed, self._count = seed, count
        facts = f"synthetic {seq_length} {vocab_size} {seed} {count}"
        self.fingerprint = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._count:
            raise IndexError(index)
        # Seeds that differ by little make generators that look alike at first; digests differ.
        digest = hashlib.blake2b(f"{self._seed}/{index}".encode(), digest_size=8).digest()
        source = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        row = torch.randint(self.vocab_size, (self.seq_length + 1,), generator=source)  # (l + 1,)
        return Sample.of_text(row)

    def told(self) -> str:
        return f"{self._count * (self.seq_length + 1):,} synthetic tokens"
