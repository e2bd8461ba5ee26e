"""What enroot adds to an image, put among the names of a merged tree.

The same as `sqshforge.squash.enroot_layer` does to a mounted one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from sqshforge.image import enroot
from sqshforge.image.layer_tree import Folder, Node, steps
from sqshforge.tar import limits
from sqshforge.tar.reader import FILE, SYMLINK, Entry

Names = dict[bytes, Node | Folder]
ETC = b"etc"


class Placed(NamedTuple):
    """An entry that no layer brings, and its data."""

    entry: Entry
    data: bytes


def place(names: Names, files: Mapping[str, bytes], epoch: int) -> dict[bytes, Placed]:
    """Make room for `files` in /etc and for what is missing to start the image; gives those.

    Where /etc is a link, relative or absolute, to a folder of the image, its files go there. Where
    it leads nowhere, in a circle, to the root or to something else, or is itself something else,
    or is missing, a folder takes its place. Whatever stands where a file goes is taken away,
    folders with all that is in them. /etc and /dev get the time `epoch`, as things are put in and
    taken out there. Without any `files` nothing is done.
    """
    if not files:
        return {}
    home = _folder(names, ETC) or ETC
    for name in (b"dev", b"proc", b"sys", home):
        folder = names.get(name)
        if not isinstance(folder, Folder):
            folder = names[name] = Folder()
        if folder.entry is not None and name in (b"dev", home):
            folder.entry = folder.entry._replace(mtime=epoch)
    placed = {}
    for file, data in files.items():
        path = home + os.fsencode(file)[len(ETC) :]
        placed[path] = Placed(made(path, FILE, 0o644, epoch, len(data)), data)
        if isinstance(names.pop(path, None), Folder):
            for inner in [one for one in names if one.startswith(path + b"/")]:
                del names[inner]
    for empty in enroot.EMPTY:
        path = home + b"/" + os.fsencode(empty)
        if path not in names:
            placed[path] = Placed(made(path, FILE, 0o755, epoch), b"")
    path = home + b"/mtab"
    if path not in names:
        target = os.fsencode(enroot.MTAB)
        placed[path] = Placed(made(path, SYMLINK, 0o777, epoch, target=target), b"")
    return placed


def made(
    name: bytes, kind: bytes, mode: int, mtime: int, size: int = 0, target: bytes = b""
) -> Entry:
    """An entry of our own."""
    return Entry(name, kind, mode, mtime, size, 0, target, (0, 0), (), None)


def _folder(names: Names, path: bytes) -> bytes | None:
    """The folder that a path leads to, links followed; None if there is none, b"" for the root."""
    at: list[bytes] = []
    todo = [path]
    followed = 0
    while todo:
        part = todo.pop()
        if part == b"..":
            del at[-1:]
            continue
        node = names.get(b"/".join([*at, part]))
        if isinstance(node, Folder):
            at.append(part)
            continue
        followed += 1
        if node is None or node.entry.kind != SYMLINK or followed > limits.LINKS:
            return None
        if node.entry.target.startswith(b"/"):
            at.clear()
        todo += reversed(steps(node.entry.target))
    return b"/".join(at)
