"""Files of JSON lines that a process may still be writing to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read(path: Path, kind: str) -> list[dict[str, Any]]:
    """Read the records of one kind, except a last line that is still incomplete."""
    lines = path.read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [one for one in records if one["kind"] == kind]
