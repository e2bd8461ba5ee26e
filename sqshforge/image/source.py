"""What a source is: an image's config, and its content as folders or as tar streams."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import IO, Protocol, runtime_checkable

from sqshforge.errors import RequestError
from sqshforge.hot import HotList
from sqshforge.image.enroot import ImageConfig
from sqshforge.project import NEWEST_EPOCH


@dataclass(frozen=True)
class Folder:
    """An image's root file system as folders, mounted or lying somewhere; they are only read.

    `stack` is merged to become the root file system, `layers` are the image's own; both have the
    lowest first. `layers` is empty where they cannot be seen.
    """

    stack: tuple[Path, ...]
    layers: tuple[Path, ...] = ()

    def top_names(self, index: int) -> frozenset[bytes] | None:
        """The names in `/` that a layer brings or hides; None where that cannot be seen."""
        if not self.layers:
            return None
        return frozenset(os.fsencode(path.name) for path in self.layers[index].iterdir())


class Stream(Protocol):
    """An image's root file system as tar streams, flat, with enroot's changes made."""

    def top_names(self, index: int) -> frozenset[bytes] | None:
        """The names in `/` that a layer brings or hides; None where that cannot be seen."""

    def write_base(
        self,
        out: IO[bytes],
        files: Mapping[str, bytes],
        epoch: int,
        advance: Callable[[float], None],
        *,
        split: bool,
        xattrs: bool,
        devices: bool,
        hot: HotList,
    ) -> list[bytes]:
        """Write the tree, with `files` in it; without /sqshforge where it is `split` off.

        Files that are in the list `hot` come first, and their paths are given back in that order.
        Extended attributes and device nodes come only where they are asked for.
        """

    def write_payload(self, out: IO[bytes]) -> None:
        """Write /sqshforge alone; nothing where the image has no such folder."""


@runtime_checkable
class Remote(Protocol):
    """An image whose layers have to be fetched to be seen; its /sqshforge can be had alone."""

    def claimed_base(self) -> tuple[str, ...]:
        """The layers without those on top that touch nothing but /sqshforge; empty where unknown.

        The image's history says so, and that may be wrong.
        """

    def write_payload(self, out: IO[bytes]) -> None:
        """Write /sqshforge alone; nothing where the image has no such folder."""

    def fetched(self, folder: Path) -> AbstractContextManager[Stream]:
        """Fetch the layers into a folder for the length of a block, and leave nothing there."""


Content = Folder | Stream | Remote


class Source(Protocol):
    """An image to pack."""

    def config(self) -> ImageConfig:
        """How the image is to be run; `RequestError` where there is no such image."""

    def open(self, digest: str | None = None) -> AbstractContextManager[Content]:
        """Give the content for the length of a block, and leave nothing behind.

        With the digest of a config, never the content of another image: a name may have come to
        mean another one since. `WorkError` where that image cannot be had any more.
        """


@dataclass(frozen=True)
class Rootfs:
    """A folder that holds a root file system; it has no config, and is as old as its content."""

    folder: Path

    def holds(self, place: Path) -> bool:
        """Whether a place lies in the folder."""
        return place.parent.resolve().is_relative_to(self.folder.resolve())

    def config(self) -> ImageConfig:
        if not (self.folder / "etc").is_dir():
            raise RequestError(
                "the folder holds no root file system (it has no etc/)", where=str(self.folder)
            )
        found = [self.folder.lstat(), *(path.lstat() for path in self.folder.rglob("*"))]
        return ImageConfig(
            reference=f"rootfs:{self.folder}",
            created=min(max(0, *(int(one.st_mtime) for one in found)), NEWEST_EPOCH),
            size=sum({one.st_ino: one.st_size for one in found if S_ISREG(one.st_mode)}.values()),
        )

    @contextmanager
    def open(self, digest: str | None = None) -> Iterator[Folder]:
        yield Folder((self.folder.absolute(),))
