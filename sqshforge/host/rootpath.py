"""Paths of a container seen from outside, before its root becomes the root."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

LINKS = 40  # the most that the kernel follows in one path, path_resolution(7)


def inside(root: Path, path: str) -> Path:
    """Resolve a path with `root` as /: no link and no `..` of an image leads out of it.

    The last part need not exist. Raises `OSError` (ELOOP) for links that form a loop.
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
    """Resolve the path of a folder as `inside` does, and make the folder if there is none."""
    place = inside(root, path)
    place.mkdir(parents=True, exist_ok=True)
    return place


def text(root: Path, path: str) -> str:
    """The text of a file of the container (surrogateescape keeps its bytes); empty without a file.

    It is read as bytes, because text mode would take a carriage return for the end of a line.
    """
    place = inside(root, path)
    return place.read_bytes().decode(errors="surrogateescape") if place.is_file() else ""


def unescape(field: str) -> str:
    r"""Decode a field of fstab or mountinfo: \040 is a space, and so on."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
