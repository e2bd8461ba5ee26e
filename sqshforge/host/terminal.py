"""What is drawn: the live line of work under way, and the tables of results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from sqshforge.host.progress import Tracker

WIDE = 400  # columns where there is no terminal


class _Live(Tracker):
    def __init__(self, name: str, total: float | None, unit: str, bar: Progress) -> None:
        super().__init__(name, total, unit)
        self._bar = bar
        self._task = bar.add_task(name, total=total, state="")

    def redraw(self) -> None:
        state = (self.figures() or self.doing).replace("[", r"\[")
        self._bar.update(self._task, completed=self.done, total=self.total, state=state[:100])


@contextmanager
def live(console: Console, name: str, total: float | None, unit: str) -> Iterator[Tracker]:
    """A line that follows one piece of work, and is gone at its end."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Live(name, total, unit, bar)


def show_table(table: Table) -> None:
    """Print a result's table: as wide as the terminal, and never cut where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)
