"""The errors of squash files, in one voice."""

from __future__ import annotations

from sqshforge.errors import WorkError


class BrokenError(WorkError):
    """A squash file that cannot be so: damaged, cut short, or made to deceive."""

    def __init__(self, why: str, where: str = "") -> None:
        super().__init__(
            f"the squash file is broken: {why}",
            where=where,
            fix="copy it again from where it was whole, or pack it anew",
        )
