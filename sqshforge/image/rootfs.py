"""A folder that holds a root file system."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from sqshforge.errors import RequestError
from sqshforge.image.enroot import ImageConfig
from sqshforge.image.source import Folder


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
        yield Folder((self.folder.absolute(),))
