"""The types of requests to engines and of their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sqshforge.platforms import Platform

GROWS = {"tar": 1.0, "gzip": 3.0, "zstd": 3.5}  # the growth of layers of packages when unpacked


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image as an engine knows it."""

    id: str
    labels: Mapping[str, str]
    size: int  # bytes, unpacked


@dataclass(frozen=True, kw_only=True)
class Build:
    """One build: a context with its Dockerfile, and its inputs from outside.

    `epoch` is the time in seconds to give to everything in the image; None keeps the real times.
    `args` holds the same time, which is how BuildKit gets it since 0.11 (docker 23).
    """

    context: Path
    name: str
    epoch: int | None = None
    args: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)  # in addition to the Dockerfile's
    secrets: Mapping[str, Path] = field(default_factory=dict)
    network: str = "host"  # or "none"
    annotations: Mapping[str, str] = field(default_factory=dict)  # if the engine supports them
    platform: Platform | None = None  # None: this machine's own

    def options(self, network: str | None = None) -> list[str]:
        """The options that docker and buildah share, except for buildah's own way to be offline."""
        words = ["--network", network or self.network, "--tag", self.name, *on(self.platform)]
        words += [w for k, v in sorted(self.args.items()) for w in ("--build-arg", f"{k}={v}")]
        return words + self.secret_options()

    def secret_options(self) -> list[str]:
        sources = sorted(self.secrets.items())
        return [word for name, path in sources for word in ("--secret", f"id={name},src={path}")]


def other(platform: Platform | None) -> Platform | None:
    """A platform that an engine must be asked for; None for this machine's own."""
    return None if platform is None or platform.is_own else platform


def on(platform: Platform | None) -> list[str]:
    """The options of docker and buildah for a platform; empty for this machine's own."""
    foreign = other(platform)
    return ["--platform", foreign.name] if foreign else []
