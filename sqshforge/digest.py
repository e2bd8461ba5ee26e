"""The digest of a large file: a hash over the hashes of its pieces.

The pieces are hashed side by side, and after a change at a file's end only that end is read
again; a plain SHA-256 of a file of 20 GB would take longer than all else that an edit calls for.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE = 16 << 20  # bytes


def pieces(path: Path, jobs: int, known: Sequence[str] = ()) -> list[str]:
    """The SHA-256 of each piece of a file; where one is `known` (not empty) it is not read."""
    with path.open("rb") as file:
        descriptor = file.fileno()
        count = -(-os.fstat(descriptor).st_size // PIECE)

        def one(index: int) -> str:
            if index < len(known) and known[index]:
                return known[index]
            return hashlib.sha256(os.pread(descriptor, PIECE, index * PIECE)).hexdigest()

        with ThreadPoolExecutor(jobs) as threads:
            return list(threads.map(one, range(count)))


def whole(found: Sequence[str]) -> str:
    """The digest of a file by those of its pieces: `sha256-16MiB:` and 64 digits."""
    return "sha256-16MiB:" + hashlib.sha256("\n".join(found).encode()).hexdigest()


def of(path: Path, jobs: int) -> str:
    """The digest of a file, read now."""
    return whole(pieces(path, jobs))
