"""What the command lines of conversion and generation share. Light: no torch here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from training.errors import RequestError, TrainingError


class Parser(argparse.ArgumentParser):
    """A parser whose faults are RequestErrors; long flags must be whole."""

    def __init__(self, program: str, about: str) -> None:
        super().__init__(
            prog=program,
            description=about,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise RequestError(message)


def enter(work: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> int:
    """Do the work that the arguments ask for; the exit code. What went wrong is told once."""
    try:
        work(arguments)
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0
