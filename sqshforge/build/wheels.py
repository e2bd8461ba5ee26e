"""The files of locked Python packages: their URLs in the indexes, and which fits a platform."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from sqshforge.errors import MissingError, WorkError
from sqshforge.host import temporary
from sqshforge.host.programs import Programs
from sqshforge.lock.model import LockedPackage
from sqshforge.lock.python import NEWEST_GLIBC, require_uv, uv_platform
from sqshforge.network.access import Pip, uv_environment
from sqshforge.network.mirrors import bare
from sqshforge.platforms import Platform

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class File:
    """One file of a package, with its URL and expected sha256."""

    package: str
    url: str
    sha256: str

    @property
    def name(self) -> str:
        return unquote(urlparse(self.url).path).rpartition("/")[2]


def files(
    packages: Sequence[LockedPackage], python: str, platform: Platform, pip: Pip, programs: Programs
) -> tuple[File, ...]:
    """Return for each package the one file that a Python version installs on a platform.

    It is a wheel if there is one, else the source distribution; only files whose sums are in the
    lock count. Raises `MissingError` if the indexes do not have the packages or do not answer,
    `WorkError` if no file of a package qualifies.
    """
    if not packages:
        return ()
    found = {one["name"]: one for one in _listed(packages, python, platform, pip, programs)}
    tags = {tag: rank for rank, tag in enumerate(_tags(python, platform))}
    fitting = (_fitting(package, found.get(package.name, {}), tags) for package in packages)
    return tuple(replace(file, url=_with_password(file.url, pip)) for file in fitting)


def _with_password(url: str, pip: Pip) -> str:
    """Add to a file's URL the login that pip has for the index on the same host."""
    parts = urlparse(url)
    for index in filter(None, (pip.index, *pip.extra_indexes)):
        if urlparse(bare(index)).netloc == parts.netloc:
            return parts._replace(netloc=urlparse(index).netloc).geturl()
    return url


def _fitting(package: LockedPackage, listed: Mapping[str, Any], tags: Mapping[Tag, int]) -> File:
    """Return the best file of a package: the wheel whose tag comes first, else the source."""
    allowed = {one.removeprefix("sha256:") for one in package.hashes}
    best: tuple[int, File] | None = None
    for entry in (*listed.get("wheels", ()), *filter(None, [listed.get("sdist")])):
        url = entry.get("url") or Path(entry["path"]).resolve().as_uri()
        file = File(package.name, url, entry["hashes"]["sha256"])
        rank = _rank(file.name, tags)
        if file.sha256 in allowed and rank is not None and (best is None or rank < best[0]):
            best = rank, file
    if best is None:
        raise WorkError(
            f"the index has no file of {package.name} {package.version} that the lock allows "
            "for this platform",
            where="recipes/locks",
            fix="sqshforge lock, or pip's settings: docs/start/machines.md",
        )
    return best[1]


def _rank(name: str, tags: Mapping[Tag, int]) -> int | None:
    """Rank how well a file fits, 0 being the best; None if it does not fit."""
    if not name.endswith(".whl"):
        return len(tags)
    ranks = [tags[tag] for tag in parse_wheel_filename(name)[3] if tag in tags]
    return min(ranks, default=None)


def _tags(python: str, platform: Platform) -> Iterable[Tag]:
    """Yield the tags that a CPython accepts on a platform with the locks' glibc, best first."""
    version = tuple(int(part) for part in python.split("."))
    named = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    kinds = []
    for minor in range(NEWEST_GLIBC, 4, -1):
        kinds += [f"manylinux_2_{minor}", *([named[minor]] if minor in named else [])]
    accepted = [f"{kind}_{platform.machine}" for kind in (*kinds, "linux")]
    interpreter = f"cp{''.join(python.split('.'))}"
    yield from cpython_tags(version, abis=[interpreter], platforms=accepted)
    yield from compatible_tags(version, interpreter=interpreter, platforms=accepted)


def _listed(
    packages: Sequence[LockedPackage], python: str, platform: Platform, pip: Pip, programs: Programs
) -> list[dict[str, Any]]:
    """List the files that the indexes have of these versions, from uv's pylock.toml (PEP 751)."""
    ways = [pip.without_local_indexes(), pip]
    said = ""
    for way in ways if ways[0] != pip else ways[1:]:
        with temporary.folder("files") as folder:
            wanted, listing = folder / "wanted.in", folder / "pylock.toml"
            wanted.write_text("".join(f"{one.name}=={one.version}\n" for one in packages))
            argv = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-deps"]
            argv += ["--no-config", "--no-header", "--format", "pylock.toml"]
            argv += ["--output-file", str(listing)]
            # Nothing is built, so this Python will do; uv would download one of that version.
            argv += ["--python", sys.executable, "--python-version", python]
            argv += ["--python-platform", uv_platform(platform)]
            argv += way.for_uv()
            asked = programs.attempt([*argv, str(wanted)], env=uv_environment(way))
            require_uv(asked)
            if asked.code == 0:
                return list(tomllib.loads(listing.read_text()).get("packages", ()))
            said = asked.err.strip()
    raise MissingError(
        "the package index does not have what the lock names:"
        + "".join(f"\n    {line}" for line in said.splitlines()[:8]),
        where=bare(pip.index) if pip.index else "",
        fix="check the network, pip's settings (docs/start/machines.md) and mirrors "
        "(docs/images/offline.md)",
    )
