"""The error for squash files that are broken."""

from __future__ import annotations

from sqshforge.errors import WorkError


class BrokenError(WorkError):
    """An invalid squash file: damaged, truncated, or made to deceive."""

    def __init__(self, why: str, where: str = "") -> None:
        super().__init__(
            f"the squash file is broken: {why}",
            where=where,
            fix="copy it again from where it was whole, or pack it anew",
        )
