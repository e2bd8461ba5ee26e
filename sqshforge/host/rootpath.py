"""Paths of the container as seen from outside, while its root is not yet the root."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

LINKS = 40  # that the kernel follows in one path, path_resolution(7)


def inside(root: Path, path: str) -> Path:
    """Where a path leads with `root` as /: no link and no `..` of an image leads out of it.

    The last part need not exist. Raises `OSError` (ELOOP) for links that lead in a circle.
    """
    place, links = root, 0
    ahead = list(reversed(Path(path).parts))
    while ahead:
        part = ahead.pop()
        if part == "/":
            place = root
        elif part == "..":
            place = place.parent if place != root else root
        elif (place / part).is_symlink():
            links += 1
            if links > LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            ahead += reversed((place / part).readlink().parts)
        else:
            place = place / part
    return place


def folder(root: Path, path: str) -> Path:
    """The same for a folder, which is made where there is none."""
    place = inside(root, path)
    place.mkdir(parents=True, exist_ok=True)
    return place


def text(root: Path, path: str) -> str:
    """A file of the container, its bytes kept (surrogateescape); empty where there is none.

    By its bytes, as reading text would take a carriage return for the end of a line.
    """
    place = inside(root, path)
    return place.read_bytes().decode(errors="surrogateescape") if place.is_file() else ""


def unescape(field: str) -> str:
    r"""A field of fstab or mountinfo: \040 is a space, and so on."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
