"""A merged tree as one tar, with what enroot adds to an image and leaves out of it.

The same as `sqshforge.squash.enroot_layer` does to a mounted image.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import IO, NamedTuple

from sqshforge.hot import NONE, HotList, hot_first, walk_order
from sqshforge.image import enroot
from sqshforge.image.archive.layer import PIECE, Layer
from sqshforge.image.archive.layer_files import open_all
from sqshforge.image.archive.layer_tree import Folder, Node, is_data, steps
from sqshforge.tar import limits
from sqshforge.tar.reader import CHAR, DISK, FILE, FOLDER, LINK, SYMLINK, Entry
from sqshforge.tar.writer import Output, made

Names = dict[bytes, Node | Folder]
ETC = b"etc"


class Placed(NamedTuple):
    """An entry that no layer brings, and its data."""

    entry: Entry
    data: bytes


def without_devices(names: Names) -> Names:
    """The same without the device nodes: as root a container could reach the host by them."""
    return {
        name: node
        for name, node in names.items()
        if isinstance(node, Folder) or node.entry.kind not in (CHAR, DISK)
    }


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
    hot: HotList = NONE,
) -> list[bytes]:
    """Write all in the order in which mksquashfs walks through a folder; files in `hot` come first.

    Gives the paths of those. So the squash file is the same as of the mounted image. A hard link
    follows the first name of its file. With hot files each layer is read twice.
    """
    order = sorted([*names, *placed], key=walk_order)
    parts: list[list[bytes]] = [order]
    used: list[bytes] = []
    if hot.lines:
        folders = [name for name in order if isinstance(names.get(name), Folder)]
        files = [name for name in order if _is_file(name, names, placed)]
        used, rest = hot_first(hot, files)
        done = {*folders, *files}
        others = [name for name in order if name not in done]
        parts = [[*folders, *used], [*rest, *others]]
    first = _first_names(names, [name for part in parts for name in part])
    output = Output(out, xattrs=xattrs)
    for part in parts:
        _write_part(output, part, first, names, placed, layers, epoch, advance)
    for layer in {node.layer for node in names.values() if is_data(node)}:
        layers[layer].region.file.check_unchanged()
    output.end()
    return used


def _is_file(name: bytes, names: Names, placed: Mapping[bytes, Placed]) -> bool:
    """Whether there is a regular file at a path."""
    if name in placed:
        return placed[name].entry.kind == FILE
    node = names.get(name)
    return isinstance(node, Node) and node.entry.kind == FILE


def _write_part(
    output: Output,
    order: Sequence[bytes],
    first: Mapping[Node, bytes],
    names: Names,
    placed: Mapping[bytes, Placed],
    layers: Sequence[Layer],
    epoch: int,
    advance: Callable[[float], None],
) -> None:
    """Write entries in this order, `first` being the names that hard links lead to."""
    wanted: dict[int, list[Entry]] = defaultdict(list)
    for name in order:
        node = names.get(name)
        if name not in placed and is_data(node) and first.get(node, name) == name:
            wanted[node.layer].append(node.entry)
    with ExitStack() as closing:
        files = open_all(dict(enumerate(layers)), wanted)
        for opened in files.values():
            closing.enter_context(opened)
        copied = 0  # bytes, since `advance` was last called
        for name in order:
            node = names.get(name)
            if name in placed:
                one = placed[name]
                output.header(one.entry, name)
                output.data(one.data)
                output.fill(len(one.data))
            elif node is None or isinstance(node, Folder):
                entry = node.entry if node is not None else None
                output.header(entry or made(name, FOLDER, 0o755, epoch), name)
            elif (target := first.get(node, name)) != name:
                output.header(made(name, LINK, 0, 0, target=target), name)
            else:
                output.header(node.entry, name)
                if is_data(node):
                    for piece in files[node.layer].content(node.entry):
                        output.data(piece)
                    output.fill(node.entry.size)
                    copied += node.entry.size
                    if copied >= PIECE:
                        advance(copied)
                        copied = 0
        advance(copied)


def _first_names(names: Names, order: Iterable[bytes]) -> dict[Node, bytes]:
    """The name of each hard-linked file that comes first."""
    first: dict[Node, bytes] = {}
    for name in order:
        node = names.get(name)
        if isinstance(node, Node) and node.is_linked:
            first.setdefault(node, name)
    return first
