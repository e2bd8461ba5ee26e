"""The program `sqshforge`, also as `python -m sqshforge`."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

from sqshforge.host import streams


def main() -> NoReturn:
    """Load the command line and become it."""
    streams.require()
    # Loading takes a moment, in which an interrupt would come up somewhere in a library. Nothing
    # has begun that would have to be cleared up. A shell may have it ignored: that stays.
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
