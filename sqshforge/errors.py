"""What can go wrong, as values: each error says what, where and how to mend it.

The exit codes are part of the command line's contract: 1 the work failed, 2 the request was
wrong, 3 something that is needed is missing.
"""

from __future__ import annotations


class SqshforgeError(Exception):
    """Base of all errors that a user is told about without a traceback."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", mend: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.mend = mend

    def lines(self) -> list[str]:
        """The message as it is printed: the fault, then its place, then the way out."""
        lines = [f"error: {self.what}"]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.mend:
            lines.append(f"  mend:  {self.mend}")
        return lines


class WorkError(SqshforgeError):
    """The work was possible and was tried, and it failed."""

    exit_code = 1


class RequestError(SqshforgeError):
    """What was asked for is wrong: usage, a recipe, an unknown name."""

    exit_code = 2


class MissingError(SqshforgeError):
    """Something that is needed is missing: a tool, a daemon, rights, disk space."""

    exit_code = 3
