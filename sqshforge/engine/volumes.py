"""For buildah before 1.24, which knows no `RUN --mount=type=bind`: the same by `--volume`.

Ubuntu 22.04 has such a buildah. A volume is mounted in every RUN of a build, which is the same to
a Dockerfile that mounts each folder of its context in one place only. What other stages made, and
caches, cannot be brought in that way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_WITH_BIND = (1, 24)
_FLAG = r"--mount=type=bind,source=(?P<source>[^,\s]+),target=(?P<target>[^,\s]+)"
_BIND = re.compile(rf"{_FLAG}(?: \\\n\s*| )")
_OTHER = re.compile(r"--mount=type=(?!secret)\S+")


@dataclass(frozen=True)
class Plain:
    """A Dockerfile without bind mounts, and the context's folders to mount: target -> source."""

    dockerfile: str
    volumes: Mapping[str, str]


def plain(dockerfile: str) -> Plain | None:
    """Turn the bind mounts of a Dockerfile into volumes; None where that is not possible."""
    volumes: dict[str, str] = {}
    for found in _BIND.finditer(dockerfile):
        if volumes.setdefault(found["target"], found["source"]) != found["source"]:
            return None
    text = _BIND.sub("", dockerfile)
    return None if _OTHER.search(text) else Plain(text, volumes)
