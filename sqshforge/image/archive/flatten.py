"""Write a merged tree as one tar, with the entries that enroot adds and without those it drops.

`sqshforge.squash.enroot_layer` does the same for a mounted image.
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
    """An entry that comes from no layer, and its data."""

    entry: Entry
    data: bytes


def without_devices(names: Names) -> Names:
    """Leave out device nodes, through which a container started as root could reach the host."""
    return {
        name: node
        for name, node in names.items()
        if isinstance(node, Folder) or node.entry.kind not in (CHAR, DISK)
    }


def add_enroot_files(names: Names, files: Mapping[str, bytes], epoch: int) -> dict[bytes, Placed]:
    """Make room for `files` in /etc and for entries that a start needs; return both as entries.

    If /etc is a symlink, relative or absolute, to a folder of the image, its files go there. If it
    is dangling, forms a loop, or leads to the root or to something other than a folder, or if /etc
    is missing or something else, a folder replaces it. Anything in the place of a file is removed,
    folders with their content. /etc and /dev get the time `epoch`, because their entries change.
    Without any `files`, nothing is done.
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
    """The folder that a path leads to through links; None if there is none, b"" for the root."""
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
    """Write all entries in the order in which mksquashfs walks a folder, files in `hot` first.

    This gives the same squash file as the mounted image. Returns the paths of the hot files. A hard
    link follows the first name of its file. With hot files, each layer is read twice.
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
    """Whether the entry at a path is a regular file."""
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
    """Write entries in this order; `first` has the name that the hard links of a file refer to."""
    wanted: dict[int, list[Entry]] = defaultdict(list)
    for name in order:
        node = names.get(name)
        if name not in placed and is_data(node) and first.get(node, name) == name:
            wanted[node.layer].append(node.entry)
    with ExitStack() as closing:
        files = open_all(dict(enumerate(layers)), wanted)
        for opened in files.values():
            closing.enter_context(opened)
        copied = 0  # bytes since the last call of `advance`
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
    """The first name of each hard-linked file."""
    first: dict[Node, bytes] = {}
    for name in order:
        node = names.get(name)
        if isinstance(node, Node) and node.is_linked:
            first.setdefault(node, name)
    return first
