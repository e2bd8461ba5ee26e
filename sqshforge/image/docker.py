"""An image of a docker daemon, whose layers root on its machine mounts; others have it saved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from sqshforge.engine.daemon import Daemon
from sqshforge.errors import RequestError, WorkError
from sqshforge.host.programs import Programs
from sqshforge.host.resources import require_space
from sqshforge.host.terminal import Reporter
from sqshforge.image import temporary
from sqshforge.image.archive.source import Archived, Layered
from sqshforge.image.config import Step, layers_below, parse_config, understanding
from sqshforge.image.enroot import CARRIED, ImageConfig
from sqshforge.image.source import Content, Folder, Stream

NO_TIME = -62135596800  # seconds since 1970: the year 1, Go's zero time


@dataclass(frozen=True)
class Dockerd:
    """An image of a docker daemon."""

    name: str
    programs: Programs
    reporter: Reporter = field(default_factory=lambda: Reporter(quiet=True))

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
                layers=_layers(facts),
                history=_history(self._daemon, facts["Id"]),
            )

    @contextmanager
    def open(self, digest: str | None = None) -> Iterator[Content]:
        with understanding(f"dockerd://{self.name}"):
            facts = self._facts
            folders = _folders(facts)
            if digest not in (None, facts["Id"]):
                raise WorkError(f"{self.name} now names another image", fix="pack it again")
        if not folders or os.geteuid() != 0 or not all(one.is_dir() for one in folders):
            yield Saved(self.name, facts, self._daemon, self.reporter)
            return
        yield Folder(folders, folders)
        # Docker may remove the folders of an image that no container uses.
        found = self._daemon.image(facts["Id"])
        if found is None or found.get("GraphDriver") != facts["GraphDriver"]:
            raise WorkError(
                f"{self.name} was removed from docker while it was read", fix="pack it again"
            )

    @cached_property
    def _daemon(self) -> Daemon:
        return Daemon.connect(self.programs)

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """Docker's facts about the image, asked once: the name may come to mean another one."""
        found = self._daemon.image(self.name)
        if found is None:
            raise RequestError(
                f"docker has no image {self.name!r}", fix="docker images lists what it has"
            )
        return found


@dataclass(frozen=True)
class Saved:
    """An image whose layers this process cannot read: docker saves it as an archive to read.

    Only its /sqshforge can be copied without that, from a container that is never started.
    """

    name: str
    facts: dict[str, Any]
    daemon: Daemon
    reporter: Reporter

    def claimed_base(self) -> tuple[str, ...]:
        with understanding(f"dockerd://{self.name}"):
            layers = _layers(self.facts)
            return tuple(layers[: layers_below(_history(self.daemon, self._id), len(layers))])

    def write_payload(self, out: IO[bytes]) -> None:
        for abandoned in temporary.abandoned(self.daemon.containers()):
            self.daemon.remove(abandoned)
        volumes = list(_settings(self.facts).get("Volumes") or ())
        with self.daemon.container(self._id, temporary.name(), volumes) as container:
            self.daemon.copy(container, f"/{CARRIED}", out.write)

    @contextmanager
    def fetched(self, folder: Path) -> Iterator[Stream]:
        size = int(self.facts.get("Size") or 0)
        # The packed file is written beside it, and takes about a third.
        require_space(folder, size + size // 2, f"saving {self.name}")
        tar = folder / "image.tar"
        try:
            with (
                self.reporter.track(f"docker save {self.name}", total=size or None) as tracker,
                tar.open("xb") as file,
            ):

                def write(piece: bytes) -> None:
                    file.write(piece)
                    tracker.advance(len(piece))

                self.daemon.save(self._id, write)
            with Archived(f"docker-archive:{tar}").open() as content:
                assert isinstance(content, Layered)
                if list(content.image.diff_ids) != _layers(self.facts):
                    raise WorkError(f"docker saved {self.name} with other layers than it has")
                yield content
        finally:
            tar.unlink(missing_ok=True)

    @property
    def _id(self) -> str:
        return str(self.facts["Id"])


def _settings(facts: dict[str, Any]) -> dict[str, Any]:
    """The settings to run an image with; docker has had two names for them."""
    found: dict[str, Any] = facts.get("Config") or facts.get("ContainerConfig") or {}
    return found


def _layers(facts: dict[str, Any]) -> list[str]:
    """The digests of an image's layers, the lowest first."""
    return list((facts.get("RootFS") or {}).get("Layers") or ())


def _history(daemon: Daemon, image: str) -> list[Step]:
    """The steps that made an image, the first one first."""
    return [
        Step(_time(one["Created"]), one.get("CreatedBy") or "")
        for one in reversed(daemon.history(image))
    ]


def _time(seconds: int) -> str:
    """The time of a step, from the daemon's number; empty if the image does not state it."""
    if seconds <= NO_TIME:
        return ""
    return datetime.fromtimestamp(max(0, seconds), timezone.utc).isoformat()


def _folders(facts: dict[str, Any]) -> tuple[Path, ...]:
    """The folders of an image's layers on the daemon's machine, the lowest first.

    Only the overlay2 driver has them; images in containerd's store have none.
    """
    driver = facts.get("GraphDriver") or {}
    data = driver.get("Data") or {}
    if driver.get("Name") != "overlay2" or not data.get("UpperDir"):
        return ()
    stack = [data["UpperDir"], *(data.get("LowerDir") or "").split(":")]
    found = tuple(Path(one) for one in reversed(stack) if one)
    return found if len(found) == len(_layers(facts)) else ()
