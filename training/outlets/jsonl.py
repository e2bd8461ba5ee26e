"""SAVE/metrics.jsonl: every record, a line each, one undisturbed history."""

from __future__ import annotations

import json
from pathlib import Path

from training.errors import writing
from training.outlets.outlet import Outlet, Record

FILE = "metrics.jsonl"


class JsonLines(Outlet):
    """Appends records; what the file holds of steps after `start` is removed first."""

    def __init__(self, folder: Path, start: int, name: str = FILE) -> None:
        self.path = folder / name
        with writing(self.path):
            truncate(self.path, start)

    def write(self, records: list[Record]) -> None:
        with writing(self.path), self.path.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


def truncate(path: Path, step: int) -> None:
    """Keep only the whole lines up to and with a step."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:  # torn by a kill
            continue
        if line.endswith("\n") and record["step"] <= step:
            kept.append(line)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    temporary.replace(path)
