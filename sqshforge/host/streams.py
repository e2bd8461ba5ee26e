"""The three standard streams, of which a daemon or a cron job may have left some closed."""

from __future__ import annotations

import os
import sys

MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}  # by their numbers


def require() -> None:
    """Open what is closed on /dev/null, for this process and for those that it starts.

    Python has None in the place of such a stream, and the next file that is opened takes its
    number: a program would get that as its standard input, or write into it.
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
