"""An image in buildah's storage (containers-storage), mounted while it is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sqshforge.engine.buildah import unpacked_size
from sqshforge.errors import RequestError, WorkError
from sqshforge.host.programs import Programs
from sqshforge.host.rootpath import unescape
from sqshforge.image import temporary
from sqshforge.image.config import parse_config, steps, understanding
from sqshforge.image.enroot import ImageConfig
from sqshforge.image.source import Folder

REMOVAL = 120  # seconds that removing a container may take


@dataclass(frozen=True)
class Storage:
    """An image in buildah's storage."""

    name: str
    programs: Programs

    def config(self) -> ImageConfig:
        reference = f"buildah://{self.name}"
        with understanding(reference):
            facts = self._facts
            oci = facts["OCIv1"]
            created = facts["Docker"].get("created") or oci.get("created") or ""
            return parse_config(
                facts["Docker"].get("config") or {},
                reference=reference,
                digest=f"sha256:{self._id}",
                created=created,
                size=unpacked_size(facts),
                layers=self._layers,
                history=steps(oci.get("history")),
            )

    @contextmanager
    def open(self, digest: str | None = None) -> Iterator[Folder]:
        listed = self.programs.capture(
            [self._program, "containers", "--format", "{{.ContainerName}}"]
        )
        for abandoned in temporary.abandoned(listed.splitlines()):
            self._remove(abandoned)
        container = temporary.name()
        try:
            argv: list[str | Path] = [self._program, "from", "--pull-never", "--name", container]
            made = self.programs.attempt([*argv, "--", self._id])
            if made.code != 0:
                raise WorkError(
                    f"{self.name} cannot be opened: {made.err.strip()}", fix="pack it again"
                )
            asked = self.programs.capture([self._program, "mount", container])
            merged = Path(asked.strip())
            if _mounted(merged)[0].startswith("fuse"):
                _look_through(merged)
            found = _lower(merged)
            yield Folder((merged,), found if len(found) == len(self._layers) else ())
        finally:
            self._remove(container)

    @cached_property
    def _program(self) -> Path:
        return self.programs.require("buildah", "the source is in its storage")

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """Buildah's facts about the image, asked once: the name may come to mean another one."""
        asked = self.programs.attempt(
            [self._program, "inspect", "--type", "image", "--", self.name]
        )
        if asked.code != 0:
            # Raises if the storage is at fault. Listing its images would fail on one that another
            # process is just removing.
            self.programs.capture([self._program, "info"])
            raise RequestError(
                f"buildah has no image {self.name!r}", fix="buildah images lists what it has"
            )
        with understanding(f"buildah://{self.name}"):
            found: dict[str, Any] = json.loads(asked.out)
            return found

    @property
    def _id(self) -> str:
        with understanding(f"buildah://{self.name}"):
            return str(self._facts["FromImageID"])

    @property
    def _layers(self) -> list[str]:
        with understanding(f"buildah://{self.name}"):
            return list((self._facts["OCIv1"].get("rootfs") or {}).get("diff_ids") or ())

    def _remove(self, container: str) -> None:
        """Remove a container with its mount; if buildah hangs, the next packer removes it."""
        self.programs.attempt([self._program, "rm", container], timeout=REMOVAL)


def _lower(merged: Path) -> tuple[Path, ...]:
    """The folders that the kernel's overlay on `merged` consists of, the lowest first.

    Empty if it is of another kind (fuse-overlayfs, vfs) or they cannot be read.
    """
    kind, options = _mounted(merged)
    found = re.search(r"(?:^|,)lowerdir=([^,]*)", options)
    if kind != "overlay" or found is None:
        return ()
    # The option is relative to the folder of all layers if it would be too long otherwise.
    home = merged.parent.parent
    lower = tuple(home / name for name in reversed(unescape(found[1]).split(":")))
    return lower if all(one.is_dir() for one in lower) else ()


def _mounted(place: Path) -> tuple[str, str]:
    """The kind and the options of the file system mounted on a folder; empty texts for none."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if unescape(fields.split(" ")[4]) == str(place):
            kind, _, options = rest.split(" ", 2)
            return kind, options
    return "", ""


def _look_through(folder: Path) -> None:
    """Stat every entry once.

    Fuse-overlayfs counts a file's hard links as it meets them. After this, a reader of the tree
    sees the same count at each of them, and recognizes them as one file.
    """
    for path in folder.rglob("*"):
        path.lstat()
