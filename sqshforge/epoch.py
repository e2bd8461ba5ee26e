"""SOURCE_DATE_EPOCH: the time that what is made may bear, where one is asked for.

https://reproducible-builds.org/specs/source-date-epoch/
"""

from __future__ import annotations

import os

from sqshforge.errors import RequestError

VARIABLE = "SOURCE_DATE_EPOCH"
NEWEST = 2**32 - 1  # times in a squash file are 32 bits, without a sign


def asked() -> int | None:
    """SOURCE_DATE_EPOCH in seconds; None where it is not set, `RequestError` where it is none."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) <= NEWEST):
        raise RequestError(f"{VARIABLE} is {text!r}", mend="seconds since 1970, or leave it unset")
    return int(text)
