"""Buildah: builds without a daemon."""

from __future__ import annotations

import json
import os
import re
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sqshforge.engine import working_containers
from sqshforge.engine.types import GROWS, Build, Image, on, other
from sqshforge.errors import MissingError
from sqshforge.host import emulation, resources, suggest, temporary
from sqshforge.host import rootless as storage
from sqshforge.host.programs import Programs
from sqshforge.network import access
from sqshforge.platforms import Platform

FIRST_WITH_BIND = (1, 24)
_FLAG = r"--mount=type=bind,source=(?P<source>[^,\s]+),target=(?P<target>[^,\s]+)"
_BIND = re.compile(rf"{_FLAG}(?: \\\n\s*| )")
_OTHER = re.compile(r"--mount=type=(?!secret)\S+")

KIND = "image"  # the kind in the names of sqshforge's own working containers
TIMEOUT = 10.0  # seconds to retry the removal of a busy container
PROCESSES = 32768


@dataclass(frozen=True)
class WithVolumes:
    """A Dockerfile without bind mounts, and the context's folders to mount, target -> source."""

    dockerfile: str
    volumes: Mapping[str, str]


def with_volumes(dockerfile: str) -> WithVolumes | None:
    """Turn the bind mounts of a Dockerfile into volumes; return None if that is not possible.

    This is for a buildah that does not know bind mounts, such as Ubuntu 22.04's. A volume is
    mounted in every RUN of a build, which is equivalent if the Dockerfile mounts only one folder of
    its context at each target. Mounts of other stages, and caches, cannot be replaced by volumes.
    """
    volumes: dict[str, str] = {}
    for found in _BIND.finditer(dockerfile):
        if volumes.setdefault(found["target"], found["source"]) != found["source"]:
            return None
    text = _BIND.sub("", dockerfile)
    return None if _OTHER.search(text) else WithVolumes(text, volumes)


@dataclass(frozen=True)
class Buildah:
    """The buildah program and the storage of the user who calls it."""

    program: Path
    programs: Programs
    name: str = "buildah"

    @classmethod
    def find(cls, programs: Programs) -> Buildah:
        program = programs.require("buildah", "it builds images without a daemon")
        storage.choose_buildah_storage(program, programs)
        access.choose_login_file()
        return cls(program, programs)

    def check(self, dockerfile: str, platform: Platform | None = None) -> list[str]:
        emulation.require(platform, self.programs)
        if not self._knows_bind_mounts() and with_volumes(dockerfile) is None:
            docker = suggest.install(self.programs.which, "docker", "docker-buildx")
            raise MissingError(
                f"buildah {'.'.join(map(str, self._version))} cannot build this image: "
                "its Dockerfile mounts what other stages made, which buildah can do from 1.24 on",
                where=str(self.program),
                fix=f"build with docker ({docker}; ENGINE=docker), "
                "or on a machine with a newer buildah",
            )
        return [storage.COPYING] if storage.is_copying(self._info) else []

    def storage(self) -> Path:
        return Path(self._info["store"]["GraphRoot"])

    def resources(self) -> tuple[int, int | None]:
        return resources.processors(), resources.memory()

    @cached_property
    def _info(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self.programs.capture([self.program, "info"]))
        return facts

    @cached_property
    def _version(self) -> tuple[int, ...]:
        found = re.search(
            r"version (\d+)\.(\d+)", self.programs.capture([self.program, "--version"])
        )
        return (int(found[1]), int(found[2])) if found else (0,)

    def _knows_bind_mounts(self) -> bool:
        return self._version >= FIRST_WITH_BIND

    def image(self, name: str) -> Image | None:
        asked = self.programs.attempt([self.program, "inspect", "--type", "image", name])
        if asked.code != 0:
            return None
        facts = json.loads(asked.out)
        return Image(id=facts["FromImageID"], labels=_labels(facts), size=unpacked_size(facts))

    def pull(self, reference: str, name: str, platform: Platform | None = None) -> str | None:
        asked = self.programs.attempt([self.program, "pull", "--quiet", *on(platform), reference])
        if asked.code != 0:
            return asked.err.strip() or "it says nothing"
        self.tag(reference, name)
        return None

    def tag(self, reference: str, name: str) -> None:
        self.programs.capture([self.program, "tag", reference, name])

    def save(self, name: str, tar: Path) -> None:
        address = f"docker-archive:{tar}:{name}"
        self.programs.capture([self.program, "push", "--quiet", name, address])

    def restore(self, tar: Path) -> None:
        self.programs.capture([self.program, "pull", "--quiet", f"docker-archive:{tar}"])

    def copy_out(self, name: str, folder: str, place: Path) -> None:
        with self._working_container(name, *_limits()) as container:
            argv: list[str | Path] = [self.program, "run", "--isolation", "chroot"]
            argv += ["--volume", f"{place}:/run/place:rw", container, "--"]
            # Without owners: the caller cannot remove files of the other ids in its range.
            argv += ["cp", "--recursive", "--no-dereference", "--preserve=mode,timestamps,links"]
            self.programs.capture([*argv, f"{folder}/.", "/run/place/"])

    def load(
        self,
        tar: Path,
        name: str,
        platform: Platform | None = None,
        epoch: int | None = None,
    ) -> None:
        with self._working_container("scratch") as container:
            self.programs.capture([self.program, "add", "--quiet", container, tar, "/"])
            if (foreign := other(platform)) is not None:
                kind = ["--arch", foreign.architecture]
                self.programs.capture([self.program, "config", *kind, container])
            argv: list[str | Path] = [self.program, "commit", "--quiet", "--format", "docker"]
            self.programs.capture([*argv, *_timestamp(epoch), container, name])

    @contextmanager
    def _working_container(self, image: str, *options: str) -> Iterator[str]:
        """Make a working container of an image; first remove those that killed processes left."""
        listed = self.programs.capture(
            [self.program, "containers", "--format", "{{.ContainerName}}"]
        )
        for abandoned in temporary.abandoned(listed.splitlines(), KIND):
            self.programs.attempt([self.program, "rm", abandoned])
        container = temporary.name(KIND)
        try:
            self.programs.capture([self.program, "from", "--name", container, *options, image])
            yield container
        finally:
            self.programs.attempt([self.program, "rm", container])

    def build(self, build: Build, on_line: Callable[[str], None]) -> None:
        argv: list[str | Path] = [
            *self._alone(build),
            self.program,
            "build",
            "--layers",
            "--force-rm",
            "--format",
            "oci",
        ]
        # chroot isolation needs no user manager, no cgroup and no nested privileges.
        plain = f"{build.name}-plain"
        argv += ["--isolation", "chroot", *replace(build, name=plain).options(network="host")]
        argv += _limits()
        argv += [*_timestamp(build.epoch), *self._without_bind_mounts(build), build.context]
        self._remove_leftovers(build)  # of an earlier build that was killed
        try:
            self.programs.follow(argv, on_line)
            self._annotate(plain, build)
        except BaseException:
            self._remove_leftovers(build)
            raise

    def _without_bind_mounts(self, build: Build) -> list[str | Path]:
        """The options that replace bind mounts if buildah does not know those."""
        if self._knows_bind_mounts():
            return []
        plain = with_volumes((build.context / "Dockerfile").read_text())
        assert plain is not None  # `check` has refused others
        file = build.context.with_name("Dockerfile.plain")
        file.write_text(plain.dockerfile)
        argv: list[str | Path] = ["--file", file]
        for target, source in sorted(plain.volumes.items()):
            argv += ["--volume", f"{build.context / source}:{target}:ro"]
        return argv

    def _annotate(self, plain: str, build: Build) -> None:
        """Give an image its labels, annotations and name, without another layer.

        A build with annotations would find nothing in its cache, and each step that sets a label
        takes a while. The image without them stays: removing it would remove the cached steps from
        which the next build continues.
        """
        argv: list[str | Path] = [self.program, "build", "--quiet", "--format", "oci"]
        argv += ["--layers", "--force-rm"]  # its container would stay otherwise
        argv += ["--isolation", "chroot", "--tag", build.name, *_timestamp(build.epoch)]
        argv += [*on(build.platform), *build.secret_options()]  # secrets identify its container
        for key, value in sorted(build.labels.items()):
            argv += ["--label", f"{key}={value}"]
        for key, value in sorted(build.annotations.items()):
            argv += ["--annotation", f"{key}={value}"]
        self.programs.capture([*argv, "--file", "-", "."], stdin=f"FROM {plain}\n".encode())

    def _alone(self, build: Build) -> list[str | Path]:
        """The prefix of the command of a build that must not reach any network.

        With chroot isolation buildah does not change the network, so it is started without one.
        """
        if build.network == "host":
            return []
        ours: list[str | Path] = [] if os.geteuid() == 0 else [self.program, "unshare"]
        return [*ours, self.programs.require("unshare", "it takes the network away"), "--net"]

    def _remove_leftovers(self, build: Build) -> None:
        """Remove the working containers of this build and of earlier ones with the same secrets.

        No other such build may run now: the caller holds a lock. A container whose command is still
        ending is busy for a moment.
        """
        folders = {path.parent.resolve() for path in build.secrets.values()}
        left = working_containers.of_builds(self.storage())
        ours = {container for container, folder in left.items() if folder in folders}
        if not ours:
            return
        listed = json.loads(self.programs.capture([self.program, "containers", "--json"])) or ()
        for container in sorted(ours & {one["id"] for one in listed}):
            deadline = time.monotonic() + TIMEOUT
            while self.programs.attempt([self.program, "rm", container]).code != 0:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.2)

    def source(self, name: str) -> str:
        return f"buildah://{name}"


def _timestamp(epoch: int | None) -> list[str]:
    return [] if epoch is None else ["--timestamp", str(epoch)]


def _limits() -> list[str]:
    """Limit a build to this process's limits: as root, buildah 1.39 asks for more open files.

    A root without CAP_SYS_RESOURCE, as in many containers, is refused that. The limit of processes
    is buildah's default, which no longer applies once another limit is given.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files == resource.RLIM_INFINITY:
        return []
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    processes = PROCESSES if most == resource.RLIM_INFINITY else min(most, PROCESSES)
    limits = {"nofile": files, "nproc": processes}
    return [f"--ulimit={name}={count}:{count}" for name, count in limits.items()]


def _labels(facts: dict[str, Any]) -> dict[str, str]:
    return (facts["Docker"].get("config") or {}).get("Labels") or {}


def unpacked_size(facts: dict[str, Any]) -> int:
    """The bytes of an image, unpacked, by the layers in its manifest.

    Layers that were built here are counted exactly, pulled ones are estimated from their compressed
    size. A list of images has the size too, but takes a tenth of a second.
    """
    manifest = json.loads(facts.get("Manifest") or "{}")
    return sum(
        int(layer["size"] * GROWS.get(re.split(r"[.+]", layer["mediaType"])[-1], 1.0))
        for layer in manifest.get("layers", ())
    )
