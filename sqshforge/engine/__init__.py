"""Container engines behind one shape: what a build needs of docker and of buildah."""

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
    """A container engine; all methods raise `WorkError` where it fails at the work."""

    @property
    def name(self) -> str:
        """Which engine it is: `docker` or `buildah`."""

    def check(self, dockerfile: str, platform: Platform | None = None) -> list[str]:
        """What a user should know before a build of such a Dockerfile for a platform begins.

        Raises `MissingError` where this engine cannot build it. Here and below, None stands for
        this machine's own platform.
        """

    def storage(self) -> Path | None:
        """The folder that images take room in; None where it is another machine's."""

    def resources(self) -> tuple[int, int | None]:
        """The processors and the bytes of memory that a build may use; None: not known."""

    def image(self, name: str) -> Image | None:
        """An image that the engine has, by name."""

    @property
    def program(self) -> Path:
        """The program that logs in at a registry for this engine."""

    def pull(self, reference: str, name: str, platform: Platform | None = None) -> str | None:
        """Fetch an image and give it a name; what the engine says where it cannot, else None."""

    def tag(self, reference: str, name: str) -> None:
        """Give an image that the engine has another name."""

    def save(self, name: str, tar: Path) -> None:
        """Write an image as a docker archive."""

    def restore(self, tar: Path) -> None:
        """Take in an image that `save` wrote, of this engine or another, under its name."""

    def copy_out(self, name: str, folder: str, place: Path) -> None:
        """Copy what is in a folder of an image to a folder of this machine."""

    def load(
        self,
        tar: Path,
        name: str,
        platform: Platform | None = None,
        epoch: int | None = None,
    ) -> None:
        """Make a root file system's tar an image of one layer, for a platform.

        It bears the time `epoch` where the engine can do that, else now.
        """

    def build(self, build: Build, on_line: Callable[[str], None]) -> None:
        """Build a context's Dockerfile; nothing half-built stays behind."""

    def source(self, name: str) -> str:
        """The image as a source to pack from, such as `buildah://NAME`."""


def choose(name: str | None, programs: Programs) -> Engine:
    """The engine by that name, else docker where a daemon answers, else buildah.

    Raises `RequestError` for a name that is none, `MissingError` where the engine is not there.
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
