"""The digest of a large file: a hash over the hashes of its pieces.

The pieces are hashed side by side, and after a change at a file's end only that end is read
again; a plain SHA-256 of a file of 20 GB would take longer than all else that an edit calls for.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE = 16 << 20  # bytes
PART = 1 << 20  # bytes that are read at once


def some(path: Path, indices: Iterable[int], jobs: int) -> dict[int, str]:
    """The SHA-256 of these pieces of a file, by their indices."""
    with path.open("rb") as file, ThreadPoolExecutor(jobs) as threads:
        descriptor = file.fileno()

        return dict(threads.map(lambda index: (index, _piece(descriptor, index)), indices))


def _piece(descriptor: int, index: int) -> str:
    """The SHA-256 of a piece, read in parts: memory for all of it takes as long as the hash."""
    found, part = hashlib.sha256(), memoryview(bytearray(PART))
    place, end = index * PIECE, (index + 1) * PIECE
    while place < end and (count := os.preadv(descriptor, [part[: end - place]], place)):
        found.update(part[:count])
        place += count
    return found.hexdigest()


def pieces(path: Path, jobs: int, known: Mapping[int, str] | None = None) -> list[str]:
    """The SHA-256 of each piece of a file; those that are `known`, by index, are not read."""
    count = -(-path.stat().st_size // PIECE)
    known = known or {}
    found = {**known, **some(path, (one for one in range(count) if one not in known), jobs)}
    return [found[index] for index in range(count)]


def whole(found: Sequence[str]) -> str:
    """The digest of a file by those of its pieces: `sha256-16MiB:` and 64 digits."""
    return "sha256-16MiB:" + hashlib.sha256("\n".join(found).encode()).hexdigest()


def of(path: Path, jobs: int) -> str:
    """The digest of a file, read now."""
    return whole(pieces(path, jobs))
