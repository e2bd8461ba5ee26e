"""Docker with BuildKit, where a daemon answers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqshforge.engine.types import Build, Image
from sqshforge.errors import MissingError, WorkError
from sqshforge.host import suggest
from sqshforge.host.programs import Programs

BUILDKIT = {"DOCKER_BUILDKIT": "1"}
BUILDX_SINCE = 23  # from this client on BuildKit is a plugin of its own
CUT = re.compile(r"rpc error: code = (Internal|Unavailable) desc = .*EOF")
"""What BuildKit says when it lost a connection of its own; seen with 20.10, in a build that was
started just after another one was ended."""


@dataclass(frozen=True)
class Docker:
    """A docker client that can use BuildKit, and the daemon it talks to."""

    client: Path
    programs: Programs
    name: str = "docker"

    @classmethod
    def reachable(cls, programs: Programs) -> Docker | None:
        """Docker, where a client with BuildKit is installed and a daemon answers it."""
        client = client_with_buildkit(programs)
        if client is None:
            return None
        asked = programs.attempt([client, "version", "--format", "{{.Server.Version}}"], timeout=20)
        return cls(client, programs) if asked.code == 0 else None

    @classmethod
    def connect(cls, programs: Programs) -> Docker:
        """Docker, or a `MissingError` that says which part of it is missing."""
        if programs.which("docker") is None:
            raise MissingError(
                "docker is not installed",
                mend=f"{suggest.install(programs.which, 'docker')}, or ENGINE=buildah",
            )
        if client_with_buildkit(programs) is None:
            raise MissingError(
                "the docker client has no BuildKit: its buildx plugin is not installed",
                where=str(programs.which("docker")),
                mend="install the package docker-buildx (or docker-buildx-plugin)",
            )
        docker = cls.reachable(programs)
        if docker is None:
            host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
            raise MissingError(
                "no docker daemon answers",
                where=host,
                mend="start it (systemctl start docker), or ENGINE=buildah, which needs none",
            )
        return docker

    def check(self, dockerfile: str) -> list[str]:
        return []

    def storage(self) -> Path:
        root = self.programs.capture([self.client, "info", "--format", "{{.DockerRootDir}}"])
        return Path(root.strip())

    def image(self, name: str) -> Image | None:
        asked = self.programs.attempt([self.client, "image", "inspect", name])
        if asked.code != 0:
            return None
        facts = json.loads(asked.out)[0]
        labels = facts.get("Config", {}).get("Labels") or {}
        return Image(id=facts["Id"], labels=labels, size=facts["Size"])

    @property
    def program(self) -> Path:
        return self.client

    def pull(self, reference: str, name: str) -> str | None:
        asked = self.programs.attempt([self.client, "pull", "--quiet", reference])
        if asked.code != 0:
            return asked.err.strip() or "it says nothing"
        self.tag(reference, name)
        return None

    def tag(self, reference: str, name: str) -> None:
        self.programs.capture([self.client, "tag", reference, name])

    def save(self, name: str, tar: Path) -> None:
        self.programs.capture([self.client, "save", "--output", tar, name])

    def restore(self, tar: Path) -> None:
        self.programs.capture([self.client, "load", "--input", tar])

    def copy_out(self, name: str, folder: str, place: Path) -> None:
        container = self.programs.capture([self.client, "create", name, "nothing"]).strip()
        try:
            self.programs.capture([self.client, "cp", f"{container}:{folder}/.", place])
        finally:
            self.programs.attempt([self.client, "rm", container])

    def load(self, tar: Path, name: str, epoch: int | None = None) -> None:
        # An import is made now and cannot be told otherwise: `epoch` is for other engines.
        self.programs.capture([self.client, "import", tar, name])

    def build(self, build: Build, on_line: Callable[[str], None]) -> None:
        argv: list[str | Path] = [
            self.client,
            "build",
            "--progress",
            "plain",
            *build.options(),
            build.context,
        ]
        try:
            self._follow(argv, on_line)
        except WorkError as error:
            if CUT.search(error.what) is None:
                raise
            on_line("docker lost a connection of its own: once more")
            self._follow(argv, on_line)  # goes on from the steps that are done

    def _follow(self, argv: list[str | Path], on_line: Callable[[str], None]) -> None:
        self.programs.follow(argv, lambda line: on_line(step(line)), env=BUILDKIT)

    def source(self, name: str) -> str:
        return f"dockerd://{name}"


def client_with_buildkit(programs: Programs) -> Path | None:
    """The first docker on the PATH that can use BuildKit.

    Several clients may be installed; one without BuildKit cannot pass secrets to a build.
    """
    for client in programs.all("docker"):
        asked = programs.attempt([client, "--version"], timeout=20)
        version = re.search(r"version (\d+)\.", asked.out)
        if version is None:
            continue
        if int(version[1]) < BUILDX_SINCE:
            return client
        if programs.attempt([client, "buildx", "version"], timeout=20).code == 0:
            return client
    return None


def step(line: str) -> str:
    """A line of BuildKit's plain progress without its own numbering."""
    return re.sub(r"^#\d+ ([\d.]+ )?", "", line)
