"""Container engines behind one interface: what a build needs of docker and buildah."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from sqshforge.engine.buildah import Buildah
from sqshforge.engine.docker import Docker
from sqshforge.engine.types import Build, Image
from sqshforge.errors import MissingError, RequestError
from sqshforge.host import suggest
from sqshforge.host.programs import Programs
from sqshforge.platforms import Platform

__all__ = ["NAMES", "Build", "Engine", "Image", "choose"]

NAMES = ("docker", "buildah")


class Engine(Protocol):
    """A container engine; all methods raise `WorkError` if its work fails."""

    @property
    def name(self) -> str:
        """The engine's name: `docker` or `buildah`."""

    def check(self, dockerfile: str, platform: Platform | None = None) -> list[str]:
        """Return warnings for the user before a build of a Dockerfile for a platform.

        Raises `MissingError` if this engine cannot build it. Here and below, the platform None is
        this machine's own.
        """

    def storage(self) -> Path | None:
        """The folder that holds the images; None if it is on another machine."""

    def resources(self) -> tuple[int, int | None]:
        """The processors and the bytes of memory that a build may use; None: unknown."""

    def image(self, name: str) -> Image | None:
        """The image of a name; None if the engine does not have it."""

    @property
    def program(self) -> Path:
        """The program that logs in at a registry for this engine."""

    def pull(self, reference: str, name: str, platform: Platform | None = None) -> str | None:
        """Fetch an image and name it; return None, or the engine's message if that fails."""

    def tag(self, reference: str, name: str) -> None:
        """Give another name to an image that the engine has."""

    def save(self, name: str, tar: Path) -> None:
        """Write an image as a docker archive."""

    def restore(self, tar: Path) -> None:
        """Load an image that `save` of this or another engine wrote, under its name."""

    def copy_out(self, name: str, folder: str, place: Path) -> None:
        """Copy the content of a folder of an image to the folder `place` of this machine."""

    def load(
        self,
        tar: Path,
        name: str,
        platform: Platform | None = None,
        epoch: int | None = None,
    ) -> None:
        """Make an image of one layer, for a platform, from the tar of a root file system.

        Its creation time is `epoch` if the engine can set that, else now.
        """

    def build(self, build: Build, on_line: Callable[[str], None]) -> None:
        """Build a context's Dockerfile; a failed build leaves nothing half-built."""

    def source(self, name: str) -> str:
        """The image as a source to pack from, such as `buildah://NAME`."""


def choose(name: str | None, programs: Programs) -> Engine:
    """The engine of a name; without a name, docker if a daemon answers, else buildah.

    Raises `RequestError` for an unknown name, `MissingError` if the engine is not available.
    """
    if name not in (None, "", *NAMES):
        raise RequestError(
            f"unknown engine {name!r}", where="ENGINE", fix=f"engines are: {', '.join(NAMES)}"
        )
    if name == "docker":
        return Docker.connect(programs)
    if name == "buildah":
        return Buildah.find(programs)
    docker = Docker.reachable(programs)
    if docker is not None:
        return docker
    try:
        return Buildah.find(programs)
    except MissingError:
        raise MissingError(
            "no container engine: no docker daemon answers and buildah is not installed",
            fix=f"{suggest.install(programs.which, 'buildah')} (needs no daemon), or start docker",
        ) from None
