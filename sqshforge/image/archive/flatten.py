"""A merged tree as one tar, with what enroot adds to an image and leaves out of it.

The same as `sqshforge.squash.enroot_layer` does to a mounted image.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple

from sqshforge.image import enroot
from sqshforge.image.archive.layer import PIECE, Layer, Unpacked
from sqshforge.image.archive.layer_tree import Folder, Node, is_data, steps
from sqshforge.tar import limits
from sqshforge.tar.reader import FILE, FOLDER, LINK, SYMLINK, Entry, content
from sqshforge.tar.stream import TarStream
from sqshforge.tar.writer import Output, made

Names = dict[bytes, Node | Folder]
ETC = b"etc"


class Placed(NamedTuple):
    """An entry that no layer brings, and its data."""

    entry: Entry
    data: bytes


def add_enroot_files(names: Names, files: Mapping[str, bytes], epoch: int) -> dict[bytes, Placed]:
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


def write_flat(
    out: IO[bytes],
    names: Names,
    placed: Mapping[bytes, Placed],
    layers: Sequence[Layer],
    epoch: int,
    advance: Callable[[float], None],
    *,
    xattrs: bool,
) -> None:
    """Write what has no data in the layers first, by name; then data as it comes; then links."""
    output = Output(out, xattrs=xattrs)
    data: dict[int, list[tuple[int, bytes, Entry]]] = defaultdict(list)
    links: list[tuple[bytes, bytes]] = []
    first: dict[Node, bytes] = {}
    for name in sorted([*names, *placed]):
        if name in placed:
            one = placed[name]
            output.header(one.entry, name)
            output.data(one.data)
            output.fill(len(one.data))
            continue
        node = names[name]
        if isinstance(node, Folder):
            output.header(node.entry or made(name, FOLDER, 0o755, epoch), name)
        elif node.is_linked and first.setdefault(node, name) != name:
            links.append((name, first[node]))
        elif is_data(node):
            data[node.layer].append((node.entry.offset, name, node.entry))
        else:
            output.header(node.entry, name)
    for index in sorted(data):
        _copy(layers[index], sorted(data[index]), output, advance)
    for name, target in links:
        output.header(made(name, LINK, 0, 0, target=target), name)
    output.end()


def _copy(
    layer: Layer,
    wanted: list[tuple[int, bytes, Entry]],
    output: Output,
    advance: Callable[[float], None],
) -> None:
    """Copy files of a layer in the order in which they stand in it."""
    unpacked = Unpacked(layer)
    stream = TarStream(unpacked.read, layer.where, unpacked.skip)
    told = 0
    for offset, name, entry in wanted:
        stream.skip(offset - stream.position)
        output.header(entry, name)
        for piece in content(entry, stream):
            output.data(piece)
        output.fill(entry.size)
        told += entry.size
        if told >= PIECE:
            advance(told)
            told = 0
    advance(told)
    layer.region.file.check_unchanged()
