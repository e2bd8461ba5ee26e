"""Docker with BuildKit: a client and the daemon that answers it."""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sqshforge.engine.daemon import Daemon
from sqshforge.engine.types import Build, Image, other
from sqshforge.errors import MissingError, SqshforgeError, WorkError
from sqshforge.host import emulation, suggest, temporary
from sqshforge.host.files import sha256
from sqshforge.host.programs import Programs, failed
from sqshforge.platforms import Platform

# An attestation would give the image another ID with each build of the same content.
BUILDKIT = {"DOCKER_BUILDKIT": "1", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
# To containerd's store layers go compressed by default, which takes long and which pack undoes.
UNCOMPRESSED = ("--output", "type=image,compression=uncompressed")
BUILDX_SINCE = 23  # since this major version of the client, BuildKit needs a plugin
NO_BUILDKIT = (
    "has no BuildKit: its buildx plugin is not installed",
    "install the package docker-buildx (or docker-buildx-plugin)",
)
PASSING = re.compile(
    r"rpc error: code = (Internal|Unavailable) desc = .*EOF"
    r"|failed to prepare extraction snapshot .* not found"
)
"""Errors of docker's own that the next try does not have: BuildKit lost an internal connection
(seen with 20.10, in a build that was started just after another one was ended), or containerd
removed layers of the image that a build replaces while it unpacked the new one (seen with 29.1)."""
EXCERPT = re.compile(r"\s*\d+ \| .*|-{20}|\S+:\d+")
"""Lines of the Dockerfile, which docker since 23 prints after the output of a step that failed."""


@dataclass(frozen=True)
class Docker:
    """A docker client that can use BuildKit, and the daemon that it talks to.

    The client builds; everything else goes to the daemon directly.
    """

    client: Path
    programs: Programs
    name: str = "docker"

    @classmethod
    def reachable(cls, programs: Programs) -> Docker | None:
        """Docker if a client with BuildKit is installed and a daemon answers, else None."""
        client = client_with_buildkit(programs)
        if client is None:
            return None
        found = cls(client, programs)
        try:
            _ = found.daemon
        except SqshforgeError:
            return None
        return found

    @classmethod
    def connect(cls, programs: Programs) -> Docker:
        """Docker; raises a `MissingError` that says which part of it is missing."""
        first = programs.which("docker")
        if first is None:
            raise MissingError(
                "docker is not installed",
                fix=f"{suggest.install(programs.which, 'docker')}, or ENGINE=buildah",
            )
        client = client_with_buildkit(programs)
        if client is None:
            why, fix = unfit(first, programs) or NO_BUILDKIT
            raise MissingError(
                f"docker cannot build: the client {why}",
                where=str(first),
                fix=f"{fix}, or ENGINE=buildah",
            )
        docker = cls(client, programs)
        try:
            _ = docker.daemon
        except MissingError as error:
            fix = f"{error.fix}; or ENGINE=buildah, which needs none"
            raise MissingError(error.what, where=error.where, fix=fix) from None
        return docker

    @cached_property
    def daemon(self) -> Daemon:
        return Daemon.connect(self.programs)

    def check(self, dockerfile: str, platform: Platform | None = None) -> list[str]:
        if self.daemon.is_here:
            emulation.require(platform, self.programs)
        return []

    def storage(self) -> Path | None:
        return self.daemon.storage() if self.daemon.is_here else None

    def resources(self) -> tuple[int, int | None]:
        return self.daemon.resources()

    def image(self, name: str) -> Image | None:
        facts = self.daemon.image(name)
        if facts is None:
            return None
        labels = (facts.get("Config") or {}).get("Labels") or {}
        return Image(id=facts["Id"], labels=labels, size=facts["Size"])

    @property
    def program(self) -> Path:
        return self.client

    def pull(self, reference: str, name: str, platform: Platform | None = None) -> str | None:
        try:
            foreign = other(platform)
            self.daemon.pull(reference, foreign.name if foreign else None)
        except WorkError as error:
            return error.what
        self.tag(reference, name)
        return None

    def tag(self, reference: str, name: str) -> None:
        self.daemon.tag(reference, name)

    def save(self, name: str, tar: Path) -> None:
        with tar.open("wb") as file:
            self.daemon.save(name, file.write)

    def restore(self, tar: Path) -> None:
        self.daemon.load(tar)

    def copy_out(self, name: str, folder: str, place: Path) -> None:
        tar = self.programs.require("tar", "it unpacks what docker gives")
        argv: list[str | Path] = [tar, "--extract", "--no-same-owner", "--preserve-permissions"]
        argv += ["--directory", place]
        pipe = subprocess.PIPE
        with (
            self.daemon.container(name) as container,
            self.programs.start(argv, stdin=pipe, stderr=pipe) as process,
        ):
            assert process.stdin is not None and process.stderr is not None
            with suppress(BrokenPipeError):  # tar failed and reports why
                if not self.daemon.copy(container, f"{folder}/.", process.stdin.write):
                    raise WorkError(f"the image {name} has no {folder}")
                process.stdin.close()
            said, code = process.stderr.read().decode(errors="replace"), process.wait()
        if code != 0:
            raise failed([str(one) for one in argv], code, said.splitlines())

    def load(
        self,
        tar: Path,
        name: str,
        platform: Platform | None = None,
        epoch: int | None = None,
    ) -> None:
        # An import gets the current time, which cannot be changed: `epoch` is for other engines.
        foreign = other(platform)
        if foreign is None:
            self.daemon.import_tar(tar, name)
            return
        # Docker 20.10 gives each import its own machine's platform, whatever is asked for.
        with temporary.folder("import") as folder:
            self.daemon.load(archived(tar, name, foreign, folder / "image.tar"))

    def build(self, build: Build, on_line: Callable[[str], None]) -> None:
        argv: list[str | Path] = [
            self.client,
            "build",
            "--progress",
            "plain",
            *build.options(),
            *(word for k, v in sorted(build.labels.items()) for word in ("--label", f"{k}={v}")),
            *(UNCOMPRESSED if self.daemon.uses_containerd() else ()),
            build.context,
        ]
        try:
            self._follow(argv, on_line)
        except WorkError as error:
            if PASSING.search(error.what) is None:
                raise
            on_line("an error of docker's own, not of the build: once more")
            self._follow(argv, on_line)  # continues from the steps that are done

    def _follow(self, argv: list[str | Path], on_line: Callable[[str], None]) -> None:
        self.programs.follow(
            argv,
            lambda line: on_line(step(line)),
            env=BUILDKIT,
            tells_why=lambda line: line.strip() and EXCERPT.fullmatch(line) is None,
        )

    def source(self, name: str) -> str:
        return f"dockerd://{name}"


def archived(root: Path, name: str, platform: Platform, place: Path) -> Path:
    """Write an archive that docker loads: an image of one layer, the root file system `root`."""
    config = {
        "architecture": platform.architecture,
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256(root)}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(place, "w") as archive:
        archive.add(root, "layer.tar")
        for member, facts in (("config.json", config), ("manifest.json", manifest)):
            content = json.dumps(facts).encode()
            entry = tarfile.TarInfo(member)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return place


def client_with_buildkit(programs: Programs) -> Path | None:
    """The first docker on the PATH that can use BuildKit.

    Several clients may be installed; one without BuildKit cannot pass secrets to a build.
    """
    return next((one for one in programs.all("docker") if unfit(one, programs) is None), None)


def unfit(client: Path, programs: Programs) -> tuple[str, str] | None:
    """Why a program named docker cannot build, and how to fix it; None if it can."""
    said = programs.attempt([client, "--version"], timeout=20).out.strip()
    version = re.search(r"^Docker version (\d+)\.", said, re.MULTILINE)
    if version is None:  # podman's, for example, whose builds differ
        line = said.partition("\n")[0] or "nothing"
        return f"is not Docker's: it says {line}", suggest.install(programs.which, "docker")
    if int(version[1]) < BUILDX_SINCE:
        return None
    has_plugin = programs.attempt([client, "buildx", "version"], timeout=20).code == 0
    return None if has_plugin else NO_BUILDKIT


def step(line: str) -> str:
    """A line of BuildKit's plain progress without its own numbering."""
    return re.sub(r"^#\d+ ([\d.]+ )?", "", line)
