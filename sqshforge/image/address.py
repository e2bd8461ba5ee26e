"""Addresses of images to pack.

A source has a config and a content. The content is folders if the layers can be mounted (then
nothing is copied), else tar streams.
"""

from __future__ import annotations

from pathlib import Path

from sqshforge.errors import RequestError
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.image.archive.source import Archived
from sqshforge.image.buildah import Storage
from sqshforge.image.config import parse_config
from sqshforge.image.docker import Dockerd
from sqshforge.image.registry import Registry
from sqshforge.image.source import Content, Folder, Remote, Rootfs, Source, Stream

__all__ = [
    "Archived",
    "Content",
    "Dockerd",
    "Folder",
    "Registry",
    "Remote",
    "Rootfs",
    "Source",
    "Storage",
    "Stream",
    "is_address",
    "parse",
    "parse_config",
]

SCHEMES = (
    "dockerd://NAME[:TAG]",
    "buildah://NAME[:TAG]",
    "oci:DIR[:TAG]",
    "oci-archive:FILE[:TAG]",
    "docker-archive:FILE[:NAME:TAG]",
    "docker://HOST/NAME[:TAG]",
    "rootfs:DIR",
)


def is_address(text: str) -> bool:
    """Whether a word on the command line is a source's address, not a target's name."""
    return ":" in text or "/" in text


def parse(text: str, programs: Programs, reporter: Reporter | None = None) -> Source:
    """The source at an address; `RequestError` for an unknown kind.

    A shell does not put the home in place of a `~` that follows a colon, so it is done here.
    """
    reporter = reporter or Reporter(quiet=True)
    if text.startswith("dockerd://"):
        return Dockerd(text.removeprefix("dockerd://"), programs, reporter)
    if text.startswith("buildah://"):
        return Storage(text.removeprefix("buildah://"), programs)
    if text.startswith("docker://"):
        name = text.removeprefix("docker://")
        return Registry(name, programs, reporter)
    scheme, colon, rest = text.partition(":")
    if scheme + colon == "rootfs:":
        return Rootfs(Path(_at_home(rest, text)))
    if scheme + colon in ("oci:", "oci-archive:", "docker-archive:"):
        return Archived(f"{scheme}:{_at_home(rest, text)}")
    raise RequestError(
        f"unknown kind of source {text!r}", fix=f"sources are: TARGET, {', '.join(SCHEMES)}"
    )


def _at_home(path: str, address: str) -> str:
    """Put the home in place of a path's leading `~`, if any."""
    if not path.startswith("~"):
        return path
    try:
        return str(Path(path).expanduser())
    except RuntimeError:  # ~NAME of an unknown user, or ~ of a user without a home
        raise RequestError(
            f"there is no such home: {path}", where=address, fix="write its path"
        ) from None
