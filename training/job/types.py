"""What the modules of a job share: decisions with their reasons, and small files read."""

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
    """Say a number of things: 1 process, 2 processes."""
    plural = "es" if what.endswith("s") else "s"
    return f"{number} {what}{'' if number == 1 else plural}"


def file_text(path: Path) -> str:
    """Read a file without the space around its text; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
