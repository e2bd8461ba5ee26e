"""What every outlet is."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]
"""A line of metrics.jsonl."""


class Outlet:
    """Takes the records of a run, in the order of their steps."""

    def write(self, records: list[Record]) -> None:
        """Take what has become known. Raises TrainingError if it cannot be written."""

    def step(self) -> None:
        """A step has been taken; its record comes later, when the device is asked for it."""

    def close(self, failed: bool) -> None:
        """Let go of what is held, after a run that went well or failed."""
