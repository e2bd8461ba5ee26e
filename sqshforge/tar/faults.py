"""The errors of archives, in one voice."""

from __future__ import annotations

import os

from sqshforge.errors import WorkError

AGAIN = "write the archive again, with the tool that made it, and copy it whole"


def broken(why: str, where: str, fix: str = AGAIN) -> WorkError:
    """What stands in an archive cannot be so."""
    return WorkError(f"the image archive is corrupt: {why}", where=where, fix=fix)


def refused(why: str, where: str, fix: str) -> WorkError:
    """What stands in an archive can be so, and is not taken."""
    return WorkError(f"the image archive is refused: {why}", where=where, fix=fix)


def too_much(why: str, where: str) -> WorkError:
    """More than a limit allows."""
    return refused(why, where, "build the image anew from a source that you trust")


def shown(name: bytes | str) -> str:
    """A name as a message shows it: in one line, and not longer than that."""
    text = repr(os.fsdecode(name))
    return text if len(text) <= 120 else f"{text[:60]}...{text[-50:]}"
