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
    """The source at an address; `RequestError` for an unknown kind."""
    reporter = reporter or Reporter(quiet=True)
    if text.startswith("dockerd://"):
        return Dockerd(text.removeprefix("dockerd://"), programs, reporter)
    if text.startswith("buildah://"):
        return Storage(text.removeprefix("buildah://"), programs)
    if text.startswith("docker://"):
        name = text.removeprefix("docker://")
        return Registry(name, programs, reporter)
    if text.startswith("rootfs:"):
        return Rootfs(Path(text.removeprefix("rootfs:")))
    if text.startswith(("oci:", "oci-archive:", "docker-archive:")):
        return Archived(text)
    raise RequestError(
        f"unknown kind of source {text!r}", fix=f"sources are: TARGET, {', '.join(SCHEMES)}"
    )
