"""How far the work is: one line that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

EVERY = 30.0
"""Seconds between lines where there is no terminal."""


class Progress:
    """Counts parts of a whole; `before` of them were done by an earlier run."""

    def __init__(self, what: str, whole: int, before: int = 0) -> None:
        self.what, self.whole, self.before, self.done = what, max(1, whole), before, before
        self.tokens = 0
        self._live = sys.stderr.isatty()
        self._since = self._told = time.monotonic()

    def add(self, parts: int, tokens: int) -> None:
        self.done += parts
        self.tokens += tokens
        now = time.monotonic()
        if self._live or now - self._told >= EVERY:
            self._told = now
            print(self._line(now - self._since), end=self._end(), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the last line on a terminal."""
        if self._live:
            print(file=sys.stderr, flush=True)

    def _end(self) -> str:
        return "\x1b[K\r" if self._live else "\n"

    def _line(self, seconds: float) -> str:
        rate = (self.done - self.before) / max(seconds, 1e-6)
        left = (self.whole - self.done) / rate if rate else 0.0
        return (
            f"{self.what}: {self.done / self.whole:.0%}, "
            f"{self.tokens / max(seconds, 1e-6) / 1e6:.2f} M tokens/s, {duration(left)} left"
        )


def duration(seconds: float) -> str:
    """Write a time as 12 s, 3 min 5 s or 2 h 4 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
