"""How long work is shown: a live line on a terminal, a line now and then elsewhere.

All of it goes to standard error, so that standard output stays the command's own result.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, TextIO

from sqshforge.host.units import duration, human

if TYPE_CHECKING:
    from rich.console import Console

EVERY = 10.0  # seconds between two lines where there is no terminal


class Tracker:
    """One piece of work under way: how much of it is done, and what it is doing now."""

    def __init__(self, name: str, total: float | None, unit: str) -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.done = 0.0
        self.doing = ""
        self.started = time.monotonic()

    def advance(self, amount: float) -> None:
        self.set(self.done + amount)

    def set(self, done: float, total: float | None = None) -> None:
        self.done = done
        if total is not None:
            self.total = total
        self.redraw()

    def note(self, doing: str) -> None:
        """Say what is being done now, in a few words (the last line of a build's output, say)."""
        self.doing = doing
        self.redraw()

    def redraw(self) -> None:
        """Show the new state; each kind of display has its own way."""

    def figures(self) -> str:
        """How much, how fast, how long still; empty where nothing is counted."""
        if not self.done:
            return ""
        elapsed = max(time.monotonic() - self.started, 1e-9)
        rate = self.done / elapsed
        if self.unit == "bytes":
            parts = [human(self.done), f"{human(rate)}/s"]
        else:
            parts = [f"{self.done:.0f} {self.unit}", f"{rate:.0f}/s"]
        if self.total:
            parts.insert(0, f"{min(100, 100 * self.done / self.total):.0f}%")
            parts.append(f"{duration(max(self.total - self.done, 0) / rate)} left")
        return ", ".join(parts)


class _Lines(Tracker):
    def __init__(
        self, name: str, total: float | None, unit: str, say: Callable[[str], None]
    ) -> None:
        super().__init__(name, total, unit)
        self._say = say
        self._next = self.started + EVERY

    def redraw(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY
            state = self.figures() or self.doing
            self._say(
                f"{self.name}: {duration(now - self.started)}" + (f", {state}" if state else "")
            )


class Reporter:
    """Says what is going on. `quiet` drops everything but results and errors."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._stream = stream or sys.stderr

    @cached_property
    def _terminal(self) -> Console | None:
        """The terminal, where there is one; rich takes its time to load."""
        if not self._stream.isatty():
            return None
        from rich.console import Console

        return Console(file=self._stream, highlight=False)

    def say(self, text: str) -> None:
        if self.quiet:
            return
        if self._terminal is None:
            print(text, file=self._stream, flush=True)
        else:
            self._terminal.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def track(
        self, name: str, total: float | None = None, unit: str = "bytes"
    ) -> Iterator[Tracker]:
        """Follow one piece of work for the length of a block."""
        if self.quiet:
            yield Tracker(name, total, unit)
        elif self._terminal is not None:
            from sqshforge.host.terminal import live

            with live(self._terminal, name, total, unit) as tracker:
                yield tracker
        else:
            self.say(f"{name} ...")
            yield _Lines(name, total, unit, self.say)
