"""What every logger is, and one that lets a run go on if its records cannot be written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from training.loggers.console import Console

Record = dict[str, Any]
"""A line of metrics.jsonl."""

STEADY = 5
"""Calls that must succeed before a fault counts as over: a full disk still takes a line or so."""


class Logger:
    """Takes the records of a run, in the order of their steps."""

    def write(self, records: list[Record]) -> None:
        """Take new records. Raises TrainingError if they cannot be written."""

    def step(self) -> None:
        """Note that a step was taken; its record comes later, when the device is asked for it."""

    def close(self, failed: bool) -> None:
        """Release what is held, after a run that went well or failed."""


class FaultTolerantLogger(Logger):
    """A logger whose faults are reported but end nothing: records it cannot take are dropped.

    Once it takes records again, or at the end, the number of dropped ones is reported.
    """

    def __init__(self, logger: Logger, name: str, console: Console) -> None:
        self._logger, self._name, self._console = logger, name, console
        self._failing = False
        self._taken = 0  # calls since the last one that failed
        self._dropped = 0  # records

    def write(self, records: list[Record]) -> None:
        if not self._do(lambda: self._logger.write(records)):
            self._dropped += len(records)
            self._taken = 0
            return
        self._taken += 1
        if self._failing and self._taken == STEADY:
            self._say(f"{self._name} is written again; {self._dropped} records are missing")
            self._failing, self._dropped = False, 0

    def step(self) -> None:
        self._do(self._logger.step)

    def close(self, failed: bool) -> None:
        self._do(lambda: self._logger.close(failed))
        if self._dropped:
            self._say(f"{self._name}: {self._dropped} records are missing")

    def _do(self, work: Callable[[], None]) -> bool:
        try:
            work()
            return True
        except Exception as error:  # from a disk, a library, a server: none is worth the run
            if not self._failing:
                why = str(error).partition("\n")[0] or type(error).__name__
                self._say(f"{self._name}: {why}; its records are dropped, the run goes on")
            self._failing = True
            return False

    def _say(self, text: str) -> None:
        self._console.say(f"WARNING: {text}", sys.stderr)
