"""The three standard streams, some of which a daemon or a cron job may have closed."""

from __future__ import annotations

import os
import sys

MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}  # in the order of their numbers


def require() -> None:
    """Open closed streams on /dev/null, for this process and for those that it starts.

    For a closed stream Python has None, and the next opened file takes its number: a program that
    this process starts would get that file as its standard input, or write into it.
    """
    for number, (name, mode) in enumerate(MODES.items()):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))
