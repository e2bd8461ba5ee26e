"""Buildah: builds without a daemon."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqshforge.engine.types import Build, Image
from sqshforge.programs import Programs


@dataclass(frozen=True)
class Buildah:
    """The buildah program and the storage of the user who calls it."""

    program: Path
    programs: Programs
    name: str = "buildah"

    @classmethod
    def find(cls, programs: Programs) -> Buildah:
        return cls(programs.require("buildah", "it builds images without a daemon"), programs)

    def storage(self) -> Path:
        facts = json.loads(self.programs.capture([self.program, "info"]))
        return Path(facts["store"]["GraphRoot"])

    def image(self, name: str) -> Image | None:
        asked = self.programs.attempt([self.program, "inspect", "--type", "image", name])
        if asked.code != 0:
            return None
        facts = json.loads(asked.out)
        config = facts["Docker"].get("config") or {}
        listing = self.programs.capture([self.program, "images", "--json", name])
        return Image(
            id=facts["FromImageID"],
            labels=config.get("Labels") or {},
            size=_bytes(json.loads(listing)[0]["size"]),
        )

    def pull(self, reference: str, name: str) -> bool:
        asked = self.programs.attempt([self.program, "pull", "--quiet", reference])
        if asked.code != 0:
            return False
        self.programs.capture([self.program, "tag", reference, name])
        return True

    def load(self, tar: Path, name: str) -> None:
        made = self.programs.capture([self.program, "from", "--name", _scratch(name), "scratch"])
        container = made.strip()
        try:
            self.programs.capture([self.program, "add", "--quiet", container, tar, "/"])
            self.programs.capture(
                [self.program, "commit", "--quiet", "--format", "docker", container, name]
            )
        finally:
            self.programs.attempt([self.program, "rm", container])

    def build(self, build: Build, on_line: Callable[[str], None]) -> None:
        argv: list[str | Path] = [
            self.program,
            "build",
            "--layers",
            "--force-rm",
            "--format",
            "docker",
        ]
        # chroot isolation needs no user manager, no cgroup and no nested privileges.
        argv += ["--isolation", "chroot", *build.options(), build.context]
        self.programs.follow(argv, on_line)

    def source(self, name: str) -> str:
        return f"buildah://{name}"


def _scratch(name: str) -> str:
    """The name of the working container that becomes an image."""
    return "sqshforge-load-" + re.sub(r"[^a-z0-9]+", "-", name)


def _bytes(text: str) -> int:
    """A size as buildah writes it: 1.63 GB."""
    number, unit = text.split()
    return int(float(number) * 1000 ** ["B", "KB", "MB", "GB", "TB"].index(unit.upper()))
