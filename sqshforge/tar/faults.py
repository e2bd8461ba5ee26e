"""The errors of image archives."""

from __future__ import annotations

import os

from sqshforge.errors import WorkError

AGAIN = "write the archive again, with the tool that made it, and copy it whole"


def broken(why: str, where: str, fix: str = AGAIN) -> WorkError:
    """Return the error for invalid data in an archive."""
    return WorkError(f"the image archive is corrupt: {why}", where=where, fix=fix)


def refused(why: str, where: str, fix: str) -> WorkError:
    """Return the error for data that is valid but not accepted."""
    return WorkError(f"the image archive is refused: {why}", where=where, fix=fix)


def too_much(why: str, where: str) -> WorkError:
    """Return the error for an archive that exceeds a limit."""
    return refused(why, where, "build the image anew from a source that you trust")


def shown(name: bytes | str) -> str:
    """Return a name for a message: quoted, in one line, its middle cut if it is long."""
    text = repr(os.fsdecode(name))
    return text if len(text) <= 120 else f"{text[:60]}...{text[-50:]}"
