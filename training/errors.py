"""Errors that end a run, reported in a line or few: a wrong request (2), or failed work (1)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SAVED = 85
"""Exit code of a run that was asked to stop (SIGTERM) and saved: start it again to continue."""
HUNG = 86
"""Exit code of a run that made no progress and was ended by its watch (training.observers)."""

BAD_NODE = 87
"""Exit code of a start whose preflight found a fault: start it again without the bad nodes."""
INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended at once: 128 + SIGINT."""


class TrainingError(Exception):
    """The work was possible and was attempted, but failed. The message is for the user.

    Rank 0 reports it, because every rank raises the same; a `local` one is reported by the rank
    that raises it.
    """

    exit_code = 1

    def __init__(self, message: str, *, local: bool = False) -> None:
        super().__init__(message)
        self.local = local


class RequestError(TrainingError):
    """The request was wrong: a flag, a name, a size, a folder, the data."""

    exit_code = 2
    _faults: tuple[str, ...] = ()

    @classmethod
    def of(cls, faults: list[str]) -> RequestError:
        """Make one error that lists all the faults, one per line."""
        if len(faults) == 1:
            return cls(faults[0])
        error = cls("\n".join([f"{len(faults)} faults", *(f"  - {fault}" for fault in faults)]))
        error._faults = tuple(faults)
        return error

    @property
    def faults(self) -> list[str]:
        """The faults one by one, to be listed among others."""
        return list(self._faults) or [str(self)]


class BadNode(TrainingError):  # noqa: N818 - what is bad is the node
    """A node cannot do its part of the job, according to the checks before training."""

    exit_code = BAD_NODE


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Report a full or broken disk by the file that could not be written."""
    try:
        yield
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error.strerror}", local=True) from error


@contextmanager
def reading(path: Path, asked: str = "") -> Iterator[None]:
    """Report a path that cannot be accessed, as in a closed folder, after the flag that gave it.

    Path.exists() and the like raise then: they return False only for what is certainly missing.
    """
    try:
        yield
    except OSError as error:
        place = os.fsdecode(error.filename or path)
        raise RequestError(f"{asked}{place} cannot be read: {error.strerror}") from error
