"""How long work is shown: a live line on a terminal, a line now and then elsewhere.

All of it goes to standard error, so that standard output stays the command's own result.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

EVERY = 10.0  # seconds between two lines where there is no terminal
WIDE = 400  # columns where there is no terminal


def human(count: float) -> str:
    """A number of bytes for people: 1.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """A time for people: 4.2 s, 3 min 20 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


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
    def __init__(self, name: str, total: float | None, unit: str, console: Console) -> None:
        super().__init__(name, total, unit)
        self._console = console
        self._next = self.started + EVERY

    def redraw(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY
            state = self.figures() or self.doing
            self._console.print(
                f"{self.name}: {duration(now - self.started)}" + (f", {state}" if state else ""),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


class _Live(Tracker):
    def __init__(self, name: str, total: float | None, unit: str, bar: Progress) -> None:
        super().__init__(name, total, unit)
        self._bar = bar
        self._task = bar.add_task(name, total=total, state="")

    def redraw(self) -> None:
        state = (self.figures() or self.doing).replace("[", r"\[")
        self._bar.update(self._task, completed=self.done, total=self.total, state=state[:100])


class Reporter:
    """Says what is going on. `quiet` drops everything but results and errors."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(file=sys.stderr, highlight=False)
        self.quiet = quiet

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def track(
        self, name: str, total: float | None = None, unit: str = "bytes"
    ) -> Iterator[Tracker]:
        """Follow one piece of work for the length of a block."""
        if self.quiet:
            yield Tracker(name, total, unit)
        elif self.console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                TimeElapsedColumn(),
                TextColumn("{task.fields[state]}"),
            )
            with Progress(*columns, console=self.console, transient=True) as bar:
                yield _Live(name, total, unit, bar)
        else:
            self.say(f"{name} ...")
            yield _Lines(name, total, unit, self.console)


def show_table(table: Table) -> None:
    """Print a result's table: as wide as the terminal, and never cut where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)
