"""Working containers of our builds in a storage of buildah's, and which build each is of.

buildah keeps the options of a build with each of its containers (`CommonBuildOpts` in buildah.json,
buildah 1.23 to 1.44). Among them are our secrets: files in a folder that belongs to one target of
one checkout. By it the containers that a killed build left are known from those of other builds,
and from those that a user makes of the same images.
"""

from __future__ import annotations

import json
from pathlib import Path

SECRETS = frozenset({"apt", "ca", "pip"})  # what every build of ours gets


def of_builds(storage: Path) -> dict[str, Path]:
    """The working containers by their ids, each with the folder of its build's secrets."""
    found: dict[str, Path] = {}
    for file in sorted(storage.glob("*-containers/*/userdata/buildah.json")):
        secrets = _secrets(file)
        if secrets.keys() >= SECRETS:
            found[file.parents[1].name] = secrets["ca"].parent.resolve()
    return found


def _secrets(file: Path) -> dict[str, Path]:
    """The files that were given to a container's build; nothing where that cannot be read."""
    try:
        options = json.loads(file.read_bytes())["CommonBuildOpts"]["Secrets"] or ()
        fields = [dict(part.split("=", 1) for part in one.split(",")) for one in options]
        return {one["id"]: Path(one["src"]) for one in fields}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
