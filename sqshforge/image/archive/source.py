"""An image in an archive or in an OCI layout: its layers are merged as they are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from sqshforge.errors import WorkError
from sqshforge.hot import HotList
from sqshforge.image.config import parse_config, steps, understanding
from sqshforge.image.enroot import CARRIED, ImageConfig
from sqshforge.image.source import Content

if TYPE_CHECKING:
    from sqshforge.image.archive.image import Archive


PAYLOAD = os.fsencode(CARRIED)


@dataclass(frozen=True)
class Archived:
    """An image at one of the addresses oci:, oci-archive: and docker-archive:."""

    address: str

    def config(self) -> ImageConfig:
        from sqshforge.image.archive import image as archive

        with archive.open_image(self.address) as image, understanding(self.address):
            facts = image.config
            return parse_config(
                facts.get("config") or facts.get("Config") or {},
                reference=self.address,
                digest=image.digest,
                created=facts.get("created") or "",
                size=image.size,
                layers=image.diff_ids,
                history=steps(facts.get("history")),
            )

    @contextmanager
    def open(self, digest: str | None = None) -> Iterator[Content]:
        from sqshforge.image.archive import image as archive

        with archive.open_image(self.address) as image:
            if digest not in (None, image.digest):
                raise WorkError(
                    "the archive has changed: it now holds another image",
                    where=self.address,
                    fix="pack it again",
                )
            yield Layered(image)


@dataclass(frozen=True)
class Layered:
    """An archive's image as tar streams to pack."""

    image: Archive

    def top_names(self, index: int) -> frozenset[bytes] | None:
        return self.image.top_names(index)

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
        return self.image.write_tar(
            out,
            keep=(lambda name: not _in_payload(name)) if split else (lambda name: True),
            layers=None,
            files=files,
            epoch=epoch,
            advance=advance,
            xattrs=xattrs,
            devices=devices,
            hot=hot,
        )

    def write_payload(self, out: IO[bytes]) -> None:
        self.image.write_tar(
            out, keep=_in_payload, layers=None, files={}, epoch=0, advance=lambda count: None
        )


def _in_payload(name: bytes) -> bool:
    return name == PAYLOAD or name.startswith(PAYLOAD + b"/")
