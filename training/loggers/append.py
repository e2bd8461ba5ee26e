"""Adds to a file all of what there is, or nothing: a full disk tears no record in two."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from training.errors import writing


def append(path: Path, data: bytes) -> None:
    """Append to a file, which is made if it is not there. Raises TrainingError if it cannot be."""
    left = memoryview(data)
    with writing(path):
        before = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab", buffering=0) as file:
                while left:
                    left = left[file.write(left) :]
        except OSError:
            with suppress(OSError):
                os.truncate(path, before)
            raise
