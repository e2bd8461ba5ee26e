"""The environment inside: the host's, under the image's, under what was asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sqshforge.errors import RequestError


def merge(host: Mapping[str, str], image: str, asked: Mapping[str, str]) -> dict[str, str]:
    """Merge as enroot does: the image's /etc/environment wins over the host, `asked` over both.

    `${NAME}` in the image's file is replaced by the host's value, or by nothing.
    """
    merged = dict(host)
    for line in image.split("\n"):
        name, separator, value = line.partition("=")
        if separator and name and not name.startswith("#"):
            merged[name] = re.sub(r"\$\{(\w+)\}", lambda found: host.get(found[1], ""), value)
    return {**merged, **asked}


def pairs_of(words: Sequence[str], option: str) -> dict[str, str]:
    """NAME=VALUE, each once or more; `RequestError` for a word that is none."""
    pairs = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not name or not separator:
            raise RequestError(
                f"{word!r} is not NAME=VALUE", where=option, mend=f"{option} NAME=VALUE"
            )
        pairs[name] = value
    return pairs
