"""Lines for people: on standard output, or above the progress bar while there is one."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from typing import Any, TextIO


class Console:
    """Prints the lines of one rank; the only place that knows whether a bar must be kept intact.

    The bar is drawn on standard error by tqdm, if tqdm is installed.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._redirected = ExitStack()

    def say(self, text: str, file: TextIO | None = None) -> None:
        """Print a line, on standard output if no other file is given."""
        file = file or sys.stdout
        if self._bar is None:
            print(text, file=file, flush=True)
        else:
            self._bar.write(text, file=file)
            file.flush()

    def show_bar(self, done: int, total: int) -> bool:
        """Begin a bar; return False if standard error is no terminal or tqdm is missing."""
        if not sys.stderr.isatty():
            return False
        try:
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm
        except ImportError:
            return False
        loggers = [logging.getLogger("training")]
        self._redirected.enter_context(logging_redirect_tqdm(loggers))
        self._bar = tqdm(
            initial=done, total=total, unit="step", dynamic_ncols=True, file=sys.stderr
        )
        return True

    def advance(self, steps: int = 1, **shown: str) -> None:
        """Move the bar, if there is one; `shown` is displayed behind it."""
        if self._bar is not None:
            if shown:
                self._bar.set_postfix(shown, refresh=False)
            self._bar.update(steps)

    def close(self) -> None:
        """End the bar, which stays on the terminal as it was."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._redirected.close()
