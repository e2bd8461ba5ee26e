"""The errors of squash files, in one voice."""

from __future__ import annotations

from sqshforge.errors import WorkError


class BrokenError(WorkError):
    """A squash file that cannot be so: damaged, cut short, or made to deceive."""

    def __init__(self, why: str, where: str = "") -> None:
        super().__init__(
            f"the squash file is broken: {why}",
            where=where,
            mend="copy it again from where it was whole, or pack it anew",
        )


def shown(name: bytes) -> str:
    """A name as it is told: in one line, whatever bytes it has."""
    text = name.decode(errors="backslashreplace")
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
