"""An image's content while it is packed: merged layers or tar streams, /sqshforge apart."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqshforge.errors import WorkError
from sqshforge.host.programs import Programs
from sqshforge.image import overlay
from sqshforge.image.address import Folder, Stream
from sqshforge.image.enroot import CARRIED
from sqshforge.squash import payload
from sqshforge.squash.request import PackRequest, record_image


@dataclass(frozen=True)
class Opened:
    """An image's content while it is open: mounted (`stack` is set), or streams.

    `payload` is the folder of its /sqshforge if that can be appended, else None.
    """

    content: Folder | Stream
    stack: overlay.Stack | None
    payload: Path | None


@contextmanager
def open_content(
    content: Folder | Stream, request: PackRequest, work: Path, programs: Programs
) -> Iterator[Opened]:
    """Mount an image's content below `work`, or unpack there only its /sqshforge.

    An ordinary user cannot carry extended attributes over: with them, nothing is appended.
    """
    mount, files = work / "mount", work / "files"
    mount.mkdir()
    files.mkdir()
    if isinstance(content, Folder):
        with overlay.mounted(content.stack, mount, programs) as stack:
            found = None if request.options.xattrs else payload.mounted(stack.image)
            yield Opened(content, stack, found)
    else:
        unpacked = None if request.options.xattrs else payload.unpack(content, files)
        yield Opened(content, None, unpacked)


def base_layers(request: PackRequest, content: Folder | Stream) -> tuple[str, ...] | None:
    """The layers below those that touch only /sqshforge; None if they are unknown or none."""
    layers = request.config.layers
    count = len(layers)
    while count:
        names = content.top_names(count - 1)
        if names is None:
            return None
        if not names <= {os.fsencode(CARRIED)}:
            break
        count -= 1
    return layers[:count] or None


def payload_layers(request: PackRequest, before: Mapping[str, Any] | None) -> frozenset[str]:
    """The layers above the base of an earlier file, by its record; they touch only /sqshforge.

    The pack of that file read them, or the image's history said so, which it cannot of a RUN. Empty
    if there is no record, or it is not of a file with these settings and a base.
    """
    if before is None:
        return frozenset()
    try:
        layers, base = record_image(before).layers, before["base"]
        bases = (n for n in range(1, len(layers)) if request.base_key(layers[:n]) == base)
        return frozenset(layers[next(bases, len(layers)) :])
    except (LookupError, TypeError, WorkError):  # another program's
        return frozenset()
