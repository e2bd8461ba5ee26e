"""Files of JSON lines, which a process may be writing to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read(path: Path, kind: str) -> list[dict[str, Any]]:
    """Read the records of one kind; a last line that is not yet whole is left out."""
    lines = path.read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [one for one in records if one["kind"] == kind]
