"""The program `sqshforge`, also as `python -m sqshforge`."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

from sqshforge.host import streams


def main() -> NoReturn:
    """Load the command line and run it."""
    streams.require()
    # Loading takes a moment, during which an interrupt would surface somewhere in a library. There
    # is nothing to clean up yet, so exit at once. If a shell set SIGINT to be ignored, it stays so.
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    from sqshforge.cli.main import main as command_line

    signal.signal(signal.SIGINT, usual)
    command_line()


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
