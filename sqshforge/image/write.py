"""The second pass: a merged tree as one tar, with what enroot changes of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from sqshforge.image.flatten import Names, Placed, made
from sqshforge.image.layer import PIECE, Layer, Unpacked
from sqshforge.image.layer_tree import Folder, Node, is_data
from sqshforge.tar.reader import FOLDER, LINK, Entry
from sqshforge.tar.stream import TarStream
from sqshforge.tar.writer import Output


def write(
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
    window = TarStream(unpacked.read, layer.where, unpacked.skip)
    told = 0
    for offset, name, entry in wanted:
        window.skip(offset - window.position)
        output.header(entry, name)
        at = 0
        for begin, count in entry.segments or ((0, entry.size),):
            output.zeros(begin - at)
            for piece in window.pieces(count):
                output.data(piece)
            at = begin + count
        output.zeros(entry.size - at)
        output.fill(entry.size)
        told += entry.size
        if told >= PIECE:
            advance(told)
            told = 0
    advance(told)
    layer.region.file.check_unchanged()
