"""An image of a docker daemon: its layers mounted where that can be had, else exported."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from sqshforge.errors import MissingError, RequestError, WorkError
from sqshforge.host.programs import Programs, failed
from sqshforge.host.terminal import Reporter
from sqshforge.image import docker_export, docker_mount, temporary
from sqshforge.image.config import Step, parse_config, understanding
from sqshforge.image.enroot import CARRIED, ImageConfig
from sqshforge.image.source import Content, Folder


class ReadMode(Enum):
    """How the content of an image is read."""

    EXPORTED = auto()  # as a stream, although the layers may be there to be mounted
    OWN = auto()  # mounted where this process may mount, else exported
    LENT = auto()  # mounted by docker where this process may not, which changes what it is


@dataclass(frozen=True)
class Dockerd:
    """An image of a docker daemon."""

    name: str
    programs: Programs
    reporter: Reporter = field(default_factory=lambda: Reporter(quiet=True))
    way: ReadMode = ReadMode.OWN

    def config(self) -> ImageConfig:
        reference = f"dockerd://{self.name}"
        with understanding(reference):
            facts = self._facts
            return parse_config(
                _settings(facts),
                reference=reference,
                digest=facts["Id"],
                created=facts.get("Created") or "",
                size=int(facts.get("Size") or 0),
                layers=(facts.get("RootFS") or {}).get("Layers") or [],
                history=self._history(facts["Id"]),
            )

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """What docker says of the image, asked once: a name may come to mean another one."""
        asked = self.programs.attempt([self._client, "image", "inspect", "--", self.name])
        if asked.code != 0:
            said = asked.err.strip().splitlines()
            if said and "no such image" in said[-1].lower():
                raise RequestError(
                    f"docker has no image {self.name!r}", mend="docker images lists what it has"
                )
            raise MissingError(
                f"docker does not answer: {said[-1] if said else 'no reason given'}",
                mend="start its daemon, or set DOCKER_HOST",
            )
        facts: dict[str, Any] = json.loads(asked.out)[0]
        return facts

    def _history(self, digest: str) -> list[Step]:
        argv: list[str | Path] = [self._client, "history", "--no-trunc", "--human=false"]
        argv += ["--format", "{{json .}}", digest]
        asked = self.programs.attempt(argv)
        found = [json.loads(line) for line in asked.out.splitlines() if asked.code == 0]
        return [Step(one["CreatedAt"], one["CreatedBy"]) for one in found]

    @contextmanager
    def open(self, digest: str | None = None) -> Iterator[Content]:
        with understanding(f"dockerd://{self.name}"):
            facts = self._facts
            folders = _folders(facts) if self.way is not ReadMode.EXPORTED else ()
        with ExitStack() as held:
            content = self._folder(facts, folders, held) if folders else None
            if content is None:
                yield Exported(digest or self.name, self._client, self.programs)
                return
            yield content
            # Docker may remove the folders of an image that no container uses.
            asked = self.programs.attempt(
                [self._client, "image", "inspect", "--format", "{{json .GraphDriver}}", facts["Id"]]
            )
            if asked.code != 0 or json.loads(asked.out) != facts["GraphDriver"]:
                raise WorkError(
                    f"{self.name} was removed from docker while it was read", mend="pack it again"
                )

    def _folder(
        self, facts: dict[str, Any], folders: tuple[Path, ...], held: ExitStack
    ) -> Folder | None:
        """The layers as folders that this process can read; None where it cannot come to that."""
        if os.geteuid() == 0:
            return Folder(folders, folders) if all(one.is_dir() for one in folders) else None
        if self.way is not ReadMode.LENT:
            return None
        try:
            volumes = list(_settings(facts).get("Volumes") or ())
            lent = held.enter_context(
                docker_mount.mounted(facts["Id"], folders, volumes, self._client, self.programs)
            )
        except MissingError as error:
            self.reporter.say(f"docker does not mount the image for us: {error.what}")
            return None
        return Folder(folders, folders, lent)

    @property
    def _client(self) -> Path:
        return self.programs.require("docker", "the source is in its daemon")


def _settings(facts: dict[str, Any]) -> dict[str, Any]:
    """How an image is to be run; docker has had two names for it."""
    found: dict[str, Any] = facts.get("Config") or facts.get("ContainerConfig") or {}
    return found


def _folders(facts: dict[str, Any]) -> tuple[Path, ...]:
    """The folders of an image's layers on the daemon's machine, the lowest first.

    Only the overlay2 driver has them: images of containerd's store have none.
    """
    driver = facts.get("GraphDriver") or {}
    data = driver.get("Data") or {}
    if driver.get("Name") != "overlay2" or not data.get("UpperDir"):
        return ()
    stack = [data["UpperDir"], *(data.get("LowerDir") or "").split(":")]
    found = tuple(Path(one) for one in reversed(stack) if one)
    count = len((facts.get("RootFS") or {}).get("Layers") or [])
    return found if len(found) == count else ()


@dataclass(frozen=True)
class Exported:
    """What docker gives of a container of an image: flat, and no layer is seen."""

    image: str
    client: Path
    programs: Programs

    def top_names(self, index: int) -> frozenset[bytes] | None:
        return None

    def write_base(
        self,
        out: IO[bytes],
        files: Mapping[str, bytes],
        epoch: int,
        advance: Callable[[float], None],
        *,
        split: bool,
        xattrs: bool,
    ) -> None:
        with self._container() as container, self._reading("export", container) as tar:
            docker_export.copy(tar, out, files, epoch, advance, split=split, xattrs=xattrs)

    def write_payload(self, out: IO[bytes]) -> None:
        # In a container of its own: a copy makes folders of the image's volumes in it.
        try:
            with (
                self._container() as container,
                self._reading("cp", f"{container}:/{CARRIED}", "-") as tar,
            ):
                shutil.copyfileobj(tar, out, 1 << 20)
        except WorkError as error:
            if not re.search(
                "could not find|no such (file|container:path)", error.what, re.IGNORECASE
            ):
                raise

    @contextmanager
    def _container(self) -> Iterator[str]:
        """A container of the image that is never started."""
        client = self.client
        listed = self.programs.capture([client, "ps", "--all", "--format", "{{.Names}}"])
        for abandoned in temporary.abandoned(listed.splitlines()):
            self._remove(abandoned)
        container = temporary.name()
        try:
            # An image without a command cannot be "created" unless one is named.
            self.programs.capture([client, "create", "--name", container, "--", self.image, "true"])
            yield container
        finally:
            self._remove(container)

    def _remove(self, container: str) -> None:
        """With its volumes: docker makes one for each VOLUME, and keeps it unless told so."""
        self.programs.attempt([self.client, "rm", "--force", "--volumes", container])

    @contextmanager
    def _reading(self, *words: str) -> Iterator[IO[bytes]]:
        """What a docker command writes; `WorkError` where it fails at its end."""
        argv: list[str | Path] = [self.client, *words]
        with self.programs.start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stderr is not None
            yield process.stdout
            while process.stdout.read(1 << 20):
                pass  # a reader that had enough must not leave the command waiting for it
            code = process.wait()
            if code != 0:
                said = process.stderr.read().decode(errors="replace").splitlines()
                raise failed(["docker", *words], code, said)
