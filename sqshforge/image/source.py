"""The interface of sources: an image's config, and its content as folders or tar streams."""

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
    """An image's root file system as folders, mounted or not, which are only read.

    Merging `stack` gives the root file system; `layers` are the image's own layers, or empty if
    they cannot be read. Both have the lowest first.
    """

    stack: tuple[Path, ...]
    layers: tuple[Path, ...] = ()

    def top_names(self, index: int) -> frozenset[bytes] | None:
        """The names in `/` that a layer adds or hides; None if unknown."""
        if not self.layers:
            return None
        return frozenset(os.fsencode(path.name) for path in self.layers[index].iterdir())


class Stream(Protocol):
    """An image's root file system as tar streams, flattened, with enroot's changes."""

    def top_names(self, index: int) -> frozenset[bytes] | None:
        """The names in `/` that a layer adds or hides; None if unknown."""

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
        """Write the tree, with `files` in it; with `split`, without /sqshforge.

        Files in the list `hot` come first; returns their paths in that order. Extended attributes
        and device nodes are written only if `xattrs` and `devices` ask for them.
        """

    def write_payload(self, out: IO[bytes]) -> None:
        """Write only /sqshforge; nothing if the image has no such folder."""


@runtime_checkable
class Remote(Protocol):
    """An image whose layers must be fetched to be read; its /sqshforge can be fetched alone."""

    def claimed_base(self) -> tuple[str, ...]:
        """The layers below those that touch only /sqshforge; empty if unknown.

        This comes from the image's history, which may be wrong.
        """

    def write_payload(self, out: IO[bytes]) -> None:
        """Write only /sqshforge; nothing if the image has no such folder."""

    def fetched(self, folder: Path) -> AbstractContextManager[Stream]:
        """Fetch the layers into a folder for the length of a block; they are removed after it."""


Content = Folder | Stream | Remote


class Source(Protocol):
    """An image to pack."""

    def config(self) -> ImageConfig:
        """How to run the image; `RequestError` if there is no such image."""

    def open(self, digest: str | None = None) -> AbstractContextManager[Content]:
        """Open the content for the length of a block, and leave nothing behind.

        With the digest of a config, it is never the content of another image, which the name may
        have come to mean since. Raises `WorkError` if the image is no longer available.
        """


@dataclass(frozen=True)
class Rootfs:
    """A folder that holds a root file system; it has no config, and its newest entry dates it."""

    folder: Path

    def holds(self, place: Path) -> bool:
        """Whether a path lies in the folder."""
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
