"""Find the working containers of sqshforge's builds in buildah's storage, and their builds.

buildah keeps the options of a build with each of its containers (`CommonBuildOpts` in buildah.json,
buildah 1.23 to 1.44). Among them are sqshforge's secrets: files in a folder that belongs to one
target of one checkout. The folder distinguishes the containers that a killed build left from those
of other builds, and from those that a user makes of the same images.
"""

from __future__ import annotations

import json
from pathlib import Path

SECRETS = frozenset({"apt", "ca", "pip"})  # the secrets of every build of sqshforge


def of_builds(storage: Path) -> dict[str, Path]:
    """The folders of builds' secrets, by the ids of the builds' working containers."""
    found: dict[str, Path] = {}
    for file in sorted(storage.glob("*-containers/*/userdata/buildah.json")):
        secrets = _secrets(file)
        if secrets.keys() >= SECRETS:
            found[file.parents[1].name] = secrets["ca"].parent.resolve()
    return found


def _secrets(file: Path) -> dict[str, Path]:
    """The secrets' files of a container's build, by id; empty if they cannot be read."""
    try:
        options = json.loads(file.read_bytes())["CommonBuildOpts"]["Secrets"] or ()
        fields = [dict(part.split("=", 1) for part in one.split(",")) for one in options]
        return {one["id"]: Path(one["src"]) for one in fields}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
