"""What a job on this machine leaves behind: its record, and its progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import json_lines
from tests.training.support.runs import losses


def records(save: Path, kind: str) -> list[dict[str, Any]]:
    """Read the lines of one kind in the record of job 4242."""
    path = save / "jobs" / "4242.jsonl"
    return json_lines.read(path, kind) if path.exists() else []


def last_step(save: Path) -> int:
    """Return the last step that a run has reported."""
    return len(losses(save)) if (save / "metrics.jsonl").exists() else 0
