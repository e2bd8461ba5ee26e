"""Options of the form NAME=VALUE. Light: every command line is read by it."""

from __future__ import annotations

from collections.abc import Sequence

from sqshforge.errors import RequestError


def parse_pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """NAME=VALUE, each once or more; `RequestError` for a word that is none."""
    pairs = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not name or not separator:
            raise RequestError(
                f"{word!r} is not NAME=VALUE", where=option, fix=f"{option} NAME=VALUE"
            )
        pairs[name] = value
    return pairs
