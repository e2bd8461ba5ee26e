"""What engines are asked for and what they answer with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sqshforge.platforms import Platform

GROWS = {"tar": 1.0, "gzip": 3.0, "zstd": 3.5}  # how layers of packages do when they are unpacked


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image as an engine knows it."""

    id: str
    labels: Mapping[str, str]
    size: int  # bytes, unpacked


@dataclass(frozen=True, kw_only=True)
class Build:
    """One build: a context with its Dockerfile, and what it gets from outside.

    `epoch`, in seconds, is the time that all in the image is to bear; None for the real ones. The
    same stands in `args`, by which BuildKit knows it from 0.11 on (docker 23).
    """

    context: Path
    name: str
    epoch: int | None = None
    args: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)  # beside those of the Dockerfile
    secrets: Mapping[str, Path] = field(default_factory=dict)
    network: str = "host"  # or "none"
    annotations: Mapping[str, str] = field(default_factory=dict)  # where the engine keeps any
    platform: Platform | None = None  # None: this machine's own

    def options(self, network: str | None = None) -> list[str]:
        """The words that docker and buildah share; buildah has its own way to be alone."""
        words = ["--network", network or self.network, "--tag", self.name, *on(self.platform)]
        words += [w for k, v in sorted(self.args.items()) for w in ("--build-arg", f"{k}={v}")]
        return words + self.secret_options()

    def secret_options(self) -> list[str]:
        sources = sorted(self.secrets.items())
        return [word for name, path in sources for word in ("--secret", f"id={name},src={path}")]


def other(platform: Platform | None) -> Platform | None:
    """A platform that an engine has to be asked for: all but this machine's own."""
    return None if platform is None or platform.is_own else platform


def on(platform: Platform | None) -> list[str]:
    """The words by which docker and buildah take an image for a platform."""
    foreign = other(platform)
    return ["--platform", foreign.name] if foreign else []
