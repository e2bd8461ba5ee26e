"""The end of a file of JSON lines, read without what is before it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 1 << 18  # bytes that are read at once
MOST = 1 << 24  # bytes that are read at most, about 100,000 steps: a file may have gigabytes

Record = dict[str, Any]


def blocks(path: Path, block: int = BLOCK, most: int = MOST) -> Iterator[list[bytes]]:
    """The whole lines of the end of a file, a block at a time, the last block first.

    A last line without its end is being written, or was cut off, and is left out. A file that is
    missing or cannot be read has no lines.
    """
    try:
        with path.open("rb") as file:
            place = file.seek(0, os.SEEK_END)
            least = max(0, place - most)
            rest, ended = b"", False  # of a line that begins in an earlier block; its end was seen
            while place > least:
                begin = max(least, place - block)
                file.seek(begin)
                data = file.read(place - begin)
                place = begin
                if not ended:
                    ended = b"\n" in data
                    data = data[: data.rfind(b"\n")] if ended else b""
                if not ended:
                    continue
                lines = (data + rest).split(b"\n")
                rest = lines.pop(0) if begin else b""
                yield lines
    except OSError:
        return


def parse(line: bytes) -> Record | None:
    """The record of a line; None for what is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def records(path: Path, most: int = MOST) -> list[Record]:
    """All records of the last `most` bytes of a file, in their order."""
    lines = [line for part in reversed(list(blocks(path, most=most))) for line in part]
    return [record for line in lines if (record := parse(line)) is not None]


def number(value: Any) -> float | None:
    """A finite number, or None for anything else that a file may hold in its place."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond all floats
        return None


def whole(value: Any) -> int | None:
    """A whole number, or None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def document(path: Path, most: int = MOST) -> Record | None:
    """A file that is one JSON object; None where it is missing, too large or something else."""
    try:
        with path.open("rb") as file:
            text = file.read(most + 1)
    except OSError:
        return None
    return parse(text) if len(text) <= most else None
