"""Shared by the modules of a job: decisions with their reasons, and small helpers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GIVEN = "from the environment"


@dataclass(frozen=True)
class Decision:
    """What was decided, and why."""

    name: str
    value: str
    why: str


def count(number: int, what: str) -> str:
    """Format a number with its noun: 1 process, 2 processes."""
    plural = "es" if what.endswith("s") else "s"
    return f"{number} {what}{'' if number == 1 else plural}"


def file_text(path: Path) -> str:
    """Read a file and strip its text; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
