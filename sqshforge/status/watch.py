"""Looks again and again: a drawing that is renewed on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sqshforge.status.report import lines, row, table
from sqshforge.status.run import Status

Look = Callable[[], Sequence[Status]]


def watch(look: Look, every: float, job: str = "", *, several: bool = False) -> Sequence[Status]:
    """Show runs every so many seconds until all are over; the last look.

    Without a terminal a run has a line, and one that has not changed is not told again.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        return _tell(look, every)
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            found = look()
            page = table(found) if several else Text("\n".join(lines(found[0], job)))
            live.update(page, refresh=True)
            if all(one.is_over for one in found):
                return found
            time.sleep(every)


def _tell(look: Look, every: float) -> Sequence[Status]:
    told: dict[str, tuple[str, str]] = {}
    while True:
        found = look()
        for status in found:
            name, state, _, step, of, loss, speed, left, *_ = row(status)
            if told.get(name) != (state, step):
                told[name] = state, step
                parts = [f"{name}: {state}", f"step {step}{f' of {of}' if of else ''}"]
                parts += [f"loss {loss}"] if loss else []
                parts += [f"{speed} tokens/s"] if speed else []
                parts += [f"{left} left"] if left else []
                print(" | ".join(parts), flush=True)
        if all(one.is_over for one in found):
            return found
        time.sleep(every)
