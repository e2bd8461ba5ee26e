"""SAVE/metrics.jsonl: every record, a line each, as one uninterrupted history."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from training.errors import writing
from training.loggers.base import Logger, Record

FILE = "metrics.jsonl"


class JsonLines(Logger):
    """Appends records, after removing those of steps after `start`."""

    def __init__(self, folder: Path, start: int, name: str = FILE) -> None:
        self.path = folder / name
        with writing(self.path):
            truncate(self.path, start)

    def write(self, records: list[Record]) -> None:
        """Append whole lines or nothing. Raises TrainingError if they cannot be written."""
        append_whole(self.path, "".join(json.dumps(record) + "\n" for record in records).encode())


def has_record(path: Path, kind: str, step: int) -> bool:
    """Tell whether a file has a whole record of a kind and step."""
    if not path.exists():
        return False
    with path.open("rb") as lines:
        found = (_parsed(line) for line in lines)
        return any(one.get("kind") == kind and one.get("step") == step for one in found)


def truncate(path: Path, step: int) -> None:
    """Keep only the whole lines up to and including a step.

    On a full disk, where they cannot be rewritten, keep only those before the first to be removed.
    """
    if not path.exists():
        return
    kept, whole, end = [], True, 0
    for line in path.read_bytes().splitlines(keepends=True):
        if _is_kept(line, step):
            kept.append(line)
            end += len(line) if whole else 0
        else:
            whole = False
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_bytes(b"".join(kept))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        os.truncate(path, end)


def _is_kept(line: bytes, step: int) -> bool:
    try:
        return bool(_parsed(line)["step"] <= step)
    except (TypeError, KeyError):
        return False


def _parsed(line: bytes) -> Record:
    """Parse a line; empty if a kill cut it off."""
    try:
        found = json.loads(line) if line.endswith(b"\n") else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def append_whole(path: Path, data: bytes) -> None:
    """Append all data or nothing to a file, which is made if missing. Raises TrainingError."""
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
