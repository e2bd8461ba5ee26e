"""The errors: each says what is wrong, where, and how to fix it.

The exit codes are part of the command line's contract: 1 the work failed, 2 the request was
wrong, 3 something that is needed is missing.
"""

from __future__ import annotations

LONGEST = 2000  # most characters of a printed line
MOST_LINES = 40  # most lines of a message


def shown(text: str | bytes, most: int = LONGEST) -> str:
    """Make text of any origin safe to print: in one line, without control characters.

    Text longer than `most` characters loses its middle.
    """
    if isinstance(text, bytes):
        text = text.decode(errors="backslashreplace")
    if len(text) > most:
        text = f"{text[: most // 2]}...{text[-(most // 3) :]}"
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


class SqshforgeError(Exception):
    """Base of all errors that a user sees without a traceback."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def lines(self) -> list[str]:
        """Return the message as printed: the fault, then its place, then the fix."""
        lines = [f"error: {self.what}"]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return [line for one in lines for line in _printed(one)]


def _printed(part: str) -> list[str]:
    """Return a part's lines; all except the first are indented, so none looks like another part."""
    first, *more = part.split("\n")
    if len(more) > MOST_LINES:
        more = [*more[: MOST_LINES // 2], "...", *more[-(MOST_LINES // 2) :]]
    inner = (line if line.startswith("    ") else f"    {line.strip()}" for line in more)
    return [shown(first), *map(shown, inner)]


class WorkError(SqshforgeError):
    """The work was possible and was attempted, but failed."""

    exit_code = 1


class RequestError(SqshforgeError):
    """The request was wrong: usage, a recipe, an unknown name."""

    exit_code = 2


class MissingError(SqshforgeError):
    """A prerequisite is missing: a tool, a daemon, permissions, disk space."""

    exit_code = 3
