"""Output for people: sizes and times, progress of work, and tables of results.

Long work is shown as a live line on a terminal. Without a terminal, on one that cannot move its
cursor (TERM=dumb), or if plain text is asked for (NO_COLOR), it is a line now and then. All of this
goes to standard error, so that standard output holds only the command's result. Names and texts in
both may come from an image, so everything is printed through `errors.shown`. rich is slow to load,
so it is imported only when something is drawn.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, TextIO

from sqshforge.errors import RequestError, shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Column, Table

EVERY = 10.0  # seconds between two lines without a terminal
WIDE = 400  # columns of a table without a terminal
CELL = 300  # the most characters of a table's cell
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


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


def size(text: str, where: str) -> int:
    """The bytes of a size such as 50G or 512M; others raise `RequestError`, naming `where`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise RequestError(
            f"{text!r} is not a size", where=where, fix="a number of bytes, or 512M, 50G, 1T"
        )
    return int(float(found[1]) * UNITS[found[2].upper()])


def is_plain() -> bool:
    """Whether only plain text may be written: no colors, nothing that moves the cursor."""
    kind = os.environ.get("TERM", "").lower()
    return kind in ("", "dumb", "unknown") or bool(os.environ.get("NO_COLOR"))


class Tracker:
    """One piece of work in progress: how much of it is done, and what it does now."""

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
        """Say in a few words what is being done now, such as the last line of a build's output."""
        self.doing = doing
        self.redraw()

    def redraw(self) -> None:
        """Show the new state; subclasses do it, for each kind of display."""

    def figures(self) -> str:
        """Amount done, rate and time left; empty if nothing is counted or there is no unit."""
        if not self.done or not self.unit:
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
    """Reports what is going on. `quiet` drops everything except results and errors."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._stream = stream or sys.stderr

    @cached_property
    def _terminal(self) -> Console | None:
        """The terminal; None if there is none that can be drawn on."""
        if not self._stream.isatty() or is_plain():
            return None
        from rich.console import Console

        return Console(file=self._stream, highlight=False)

    def say(self, text: str) -> None:
        """Print one line."""
        if self.quiet:
            return
        text = shown(text)
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
            with live(self._terminal, name, total, unit) as tracker:
                yield tracker
        else:
            self.say(f"{name} ...")
            yield _Lines(name, total, unit, self.say)


class _Live(Tracker):
    def __init__(self, name: str, total: float | None, unit: str, bar: Progress) -> None:
        super().__init__(name, total, unit)
        self._bar = bar
        self._task = bar.add_task(shown(name), total=total, state="")

    def redraw(self) -> None:
        state = shown(self.figures() or self.doing)[:100]
        self._bar.update(self._task, completed=self.done, total=self.total, state=state)


@contextmanager
def live(console: Console, name: str, total: float | None, unit: str) -> Iterator[Tracker]:
    """Show a line that follows one piece of work, and remove it at the end."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Live(name, total, unit, bar)


def show_lines(*lines: str) -> None:
    """Print lines of a result."""
    for line in lines:
        print(shown(line))


def show_table(table: Table, least: Sequence[str] = ()) -> None:
    """Print a result's table; the columns in `least` only if there is room for them."""
    console = output()
    console.print(fitted(table, console, least))


def output() -> Console:
    """A console for standard output: as wide as the terminal, or wide enough to cut nothing.

    Standard output itself is asked whether it is a terminal: with FORCE_COLOR, rich takes a log for
    one.
    """
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    return Console(
        highlight=False,
        force_terminal=is_terminal,
        color_system=None if is_plain() else "auto",
        width=None if is_terminal else WIDE,
    )


def fitted(table: Table, console: Console, least: Sequence[str] = ()) -> Table:
    """A result's table as it is printed: its cells are plain text, not markup.

    On a terminal that is too narrow, the columns in `least` are left out one after the other.
    """
    columns = list(table.columns)
    drawn = _as_text(columns)
    endless = console.options.update_width(sys.maxsize)
    for title in least if console.is_terminal else ():
        if console.measure(drawn, options=endless).maximum <= console.width:
            break
        columns = [one for one in columns if one.header != title]
        drawn = _as_text(columns)
    return drawn


def _as_text(columns: Sequence[Column]) -> Table:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(*(one.copy() for one in columns), box=None, pad_edge=False)
    for cells in zip(*(one.cells for one in columns), strict=True):
        drawn.add_row(*(Text(shown(str(cell), CELL)) for cell in cells))
    return drawn
