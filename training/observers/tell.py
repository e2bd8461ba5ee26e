"""Tells of a hang on standard error and in SAVE/hang.txt."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from training.loggers.console import Console


class Tell:
    """Remembers that this rank told of a hang, so that it tells of its end too."""

    def __init__(self, folder: Path, console: Console) -> None:
        self.file = folder / "hang.txt"
        self._console = console
        self._since: float | None = None

    def hang(self, text: str) -> None:
        self._write(text)
        self._since = time.monotonic()

    def progress(self) -> None:
        """There is progress: nothing is told if there was no hang, or another rank told of it."""
        if self._since is not None:
            seconds = time.monotonic() - self._since
            self._since = None
            self._write(f"hang: it has ended {seconds:.0f} s after it was told; the run goes on")

    def error(self, text: str) -> None:
        self._console.say(f"error: {text}", sys.stderr)

    @property
    def open(self) -> bool:
        """Whether this rank told of a hang that has not ended."""
        return self._since is not None

    def _write(self, text: str) -> None:
        self._console.say(text, sys.stderr)
        with suppress(OSError), self.file.open("a") as file:
            file.write(f"{datetime.now().astimezone().isoformat(timespec='seconds')}\n{text}\n\n")
