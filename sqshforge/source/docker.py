"""Where an image is read from when it is packed.

A source has a config and a content; the content is either a folder that the engine mounts
(nothing is copied) or a tar stream.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any, Protocol

from sqshforge.engine.docker import client_with_buildkit
from sqshforge.enroot import ImageConfig
from sqshforge.errors import MissingError, RequestError, WorkError
from sqshforge.programs import Programs, failed

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
SCHEMES = ("dockerd://NAME[:TAG]", "buildah://NAME[:TAG]", "rootfs:DIR")


@dataclass(frozen=True)
class Folder:
    """An image's root file system, mounted or lying somewhere; it is only read."""

    path: Path


@dataclass(frozen=True)
class Stream:
    """An image's root file system as an uncompressed tar."""

    tar: IO[bytes]


class Source(Protocol):
    """An image to pack."""

    def config(self) -> ImageConfig:
        """How the image is to be run; `RequestError` where there is no such image."""

    def open(self, digest: str | None = None) -> AbstractContextManager[Folder | Stream]:
        """Give the content for the length of a block, and leave nothing behind.

        With the digest of a config, never the content of another image: a name may have come to
        mean another one since. `WorkError` where that image cannot be had any more.
        """


def is_address(text: str) -> bool:
    """Whether a word on the command line is a source's address (a target's name is none)."""
    return ":" in text or "/" in text


def parse(text: str, programs: Programs) -> Source:
    """The source behind an address; `RequestError` for one of an unknown kind."""
    if text.startswith("dockerd://"):
        return Dockerd(text.removeprefix("dockerd://"), programs)
    if text.startswith("buildah://"):
        return Storage(text.removeprefix("buildah://"), programs)
    if text.startswith("rootfs:"):
        return Rootfs(Path(text.removeprefix("rootfs:")))
    raise RequestError(
        f"unknown kind of source {text!r}", mend=f"sources are: TARGET, {', '.join(SCHEMES)}"
    )


@dataclass(frozen=True)
class Rootfs:
    """A folder that holds a root file system; it has no config, and is as old as its content."""

    folder: Path

    def config(self) -> ImageConfig:
        if not (self.folder / "etc").is_dir():
            raise RequestError(
                "the folder holds no root file system (it has no etc/)", where=str(self.folder)
            )
        found = [self.folder.lstat(), *(path.lstat() for path in self.folder.rglob("*"))]
        return ImageConfig(
            reference=f"rootfs:{self.folder}",
            created=max(0, *(int(one.st_mtime) for one in found)),
            size=sum({one.st_ino: one.st_size for one in found if S_ISREG(one.st_mode)}.values()),
        )

    @contextmanager
    def open(self, digest: str | None = None) -> Iterator[Folder]:
        yield Folder(self.folder)


@dataclass(frozen=True)
class Storage:
    """An image in buildah's storage, mounted for as long as it is read."""

    name: str
    programs: Programs

    def config(self) -> ImageConfig:
        program = self.programs.require("buildah", "the source is in its storage")
        asked = self.programs.attempt([program, "inspect", "--type", "image", "--", self.name])
        if asked.code != 0:
            self.programs.capture([program, "images", "--json"])  # else the storage is at fault
            raise RequestError(
                f"buildah has no image {self.name!r}", mend="buildah images lists what it has"
            )
        listed = self.programs.capture([program, "images", "--json", self.name])
        reference = f"buildah://{self.name}"
        with _understanding(reference):
            facts = json.loads(asked.out)
            return parse_config(
                facts["Docker"].get("config") or {},
                reference=reference,
                digest=f"sha256:{facts['FromImageID']}",
                created=facts["Docker"].get("created") or facts["OCIv1"].get("created") or "",
                size=_bytes(json.loads(listed)[0]["size"]),
            )

    @contextmanager
    def open(self, digest: str | None = None) -> Iterator[Folder]:
        program = self.programs.require("buildah")
        listed = self.programs.capture([program, "containers", "--format", "{{.ContainerName}}"])
        for abandoned in _abandoned(listed.splitlines()):
            self._remove(program, abandoned)
        container = _working_name()
        try:
            argv: list[str | Path] = [program, "from", "--pull-never", "--name", container]
            self.programs.capture([*argv, "--", self.name])
            argv = [program, "inspect", "--type", "container", "--format", "{{.FromImageID}}"]
            made_from = self.programs.capture([*argv, container]).strip()
            if digest not in (None, f"sha256:{made_from}"):
                raise WorkError(
                    f"{self.name} is another image by now: it was built anew meanwhile",
                    mend="pack it again",
                )
            yield Folder(Path(self.programs.capture([program, "mount", container]).strip()))
        finally:
            self._remove(program, container)

    def _remove(self, program: Path, container: str) -> None:
        self.programs.attempt([program, "umount", container])
        self.programs.attempt([program, "rm", container])


@dataclass(frozen=True)
class Dockerd:
    """An image of a docker daemon, exported through a container that is never started."""

    name: str
    programs: Programs

    def config(self) -> ImageConfig:
        asked = self.programs.attempt([self._client(), "image", "inspect", "--", self.name])
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
        reference = f"dockerd://{self.name}"
        with _understanding(reference):
            facts = json.loads(asked.out)[0]
            return parse_config(
                facts.get("Config") or facts.get("ContainerConfig") or {},
                reference=reference,
                digest=facts["Id"],
                created=facts.get("Created") or "",
                size=int(facts.get("Size") or 0),
            )

    @contextmanager
    def open(self, digest: str | None = None) -> Iterator[Stream]:
        client = self._client()
        listed = self.programs.capture([client, "ps", "--all", "--format", "{{.Names}}"])
        for abandoned in _abandoned(listed.splitlines()):
            self._remove(client, abandoned)
        container = _working_name()
        try:
            # An image without a command cannot be "created" unless one is named; it is never run.
            image = digest or self.name
            self.programs.capture([client, "create", "--name", container, "--", image, "true"])
            with self.programs.start(
                [client, "export", container], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            ) as export:
                assert export.stdout is not None and export.stderr is not None
                yield Stream(export.stdout)
                while export.stdout.read(1 << 20):
                    pass  # a reader that had enough must not leave the export waiting for it
                code = export.wait()
                if code != 0:
                    said = export.stderr.read().decode(errors="replace").splitlines()
                    raise failed(["docker", "export", self.name], code, said)
        finally:
            self._remove(client, container)

    def _remove(self, client: Path, container: str) -> None:
        """With its volumes: docker makes one for each VOLUME, and keeps it unless told so."""
        self.programs.attempt([client, "rm", "--force", "--volumes", container])

    def _client(self) -> Path:
        client = client_with_buildkit(self.programs) or self.programs.which("docker")
        if client is None:
            raise MissingError("docker is not installed", mend="apt-get install docker.io")
        return client


def _working_name() -> str:
    """A name for a working container that says whose it is: a killed packer cannot remove it."""
    return f"{_prefix()}{os.getpid()}.{uuid.uuid4().hex[:12]}"


def _abandoned(names: Iterable[str]) -> list[str]:
    """The working containers, among all, of packers of this machine that are no more."""
    ours = (name for name in names if name.startswith(_prefix()))
    return [
        name
        for name in ours
        if not Path("/proc", name.removeprefix(_prefix()).partition(".")[0]).exists()
    ]


def _prefix() -> str:
    return re.sub(r"[^\w.-]", "-", f"sqshforge-pack-{os.uname().nodename}.", flags=re.ASCII)


def parse_config(
    config: dict[str, Any], *, reference: str, digest: str | None, created: str, size: int
) -> ImageConfig:
    """An image's config in docker's or OCI's shape; keys that are absent or null are empty.

    Raises `WorkError` for a shape that is neither.
    """
    with _understanding(reference):
        return ImageConfig(
            reference=reference,
            digest=digest,
            created=parse_time(created),
            size=size,
            env=_words(config.get("Env")),
            entrypoint=_words(config.get("Entrypoint")),
            cmd=_words(config.get("Cmd")),
            workdir=str(config.get("WorkingDir") or ""),
            volumes=tuple(sorted(config.get("Volumes") or {})),
            labels=tuple(sorted((str(k), str(v)) for k, v in (config.get("Labels") or {}).items())),
        )


@contextmanager
def _understanding(reference: str) -> Iterator[None]:
    """Turn what goes wrong in taking an engine's answer apart into a `WorkError`."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise WorkError(
            f"the image's config cannot be understood: {error}", where=reference
        ) from None


def parse_time(text: str) -> int:
    """Seconds of the epoch of an RFC 3339 time with any number of decimals; 0 for none."""
    if not text:
        return 0
    # Python 3.10 knows neither Z nor more decimals than six.
    whole = re.sub(r"\.\d+", "", text).replace("Z", "+00:00")
    return max(0, int((datetime.fromisoformat(whole) - EPOCH).total_seconds()))


def _words(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise TypeError(f"a list of words was expected, not {value!r}")
    return tuple(str(word) for word in value)


def _bytes(text: str) -> int:
    """A size as buildah writes it: 1.63 GB."""
    number, unit = text.split()
    return int(float(number) * 1000 ** ["B", "KB", "MB", "GB", "TB"].index(unit.upper()))
