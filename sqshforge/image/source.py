"""What a source is: an image's config, and its content as a folder or as tar streams."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import IO, Protocol

from sqshforge.errors import RequestError
from sqshforge.host.programs import Programs
from sqshforge.image import overlay
from sqshforge.image.enroot import ImageConfig
from sqshforge.project import NEWEST_EPOCH


@dataclass(frozen=True)
class Folder:
    """An image's root file system as folders, mounted or lying somewhere; they are only read.

    `stack` is merged to become the root file system, `layers` are the image's own; both have the
    lowest first. `layers` is empty where they cannot be seen. `lent` is the stack, merged already
    by one who may do it.
    """

    stack: tuple[Path, ...]
    layers: tuple[Path, ...] = ()
    lent: overlay.Stack | None = None

    @contextmanager
    def mounted(self, work: Path, programs: Programs) -> Iterator[overlay.Stack]:
        """Merge the stack for the length of a block, on `work` where that is still to be done."""
        if self.lent is not None:
            yield self.lent
        else:
            with overlay.mounted(self.stack, work, programs) as stack:
                yield stack

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
    ) -> None:
        """Write the tree, with `files` in it; without /sqshforge where it is `split` off."""

    def write_payload(self, out: IO[bytes]) -> None:
        """Write /sqshforge alone; nothing where the image has no such folder."""


Content = Folder | Stream


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
