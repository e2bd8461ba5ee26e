"""One line of the block that a job's log begins with."""

from __future__ import annotations

from dataclasses import dataclass

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
