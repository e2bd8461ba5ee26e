"""Options of the form NAME=VALUE. Cheap to import: every command line is parsed with it."""

from __future__ import annotations

from collections.abc import Sequence

from sqshforge.errors import RequestError


def parse_pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """Parse NAME=VALUE words, the last of a name counts; `RequestError` for any other word."""
    pairs = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not name or not separator:
            raise RequestError(
                f"{word!r} is not NAME=VALUE", where=option, fix=f"{option} NAME=VALUE"
            )
        pairs[name] = value
    return pairs
