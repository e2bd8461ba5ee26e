"""Bytes and times as people write them."""

from __future__ import annotations

import re

from sqshforge.errors import RequestError

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def human(count: float) -> str:
    """A number of bytes for people: 1.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """A time for people: 4.2 s, 3 min 20 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def size(text: str) -> int:
    """Bytes of a size such as 50G or 512M; `RequestError` for what is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise RequestError(f"{text!r} is no size", mend="a number of bytes, or 512M, 50G, 1T")
    return int(float(found[1]) * UNITS[found[2].upper()])
