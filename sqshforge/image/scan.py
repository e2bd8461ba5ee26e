"""The first pass over a layer: its bytes are those that were meant, and what they bring."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from sqshforge.errors import WorkError
from sqshforge.image.layer import FAULTS, PIECE, Hasher, Layer, Meter, Unpacked
from sqshforge.image.layer_tree import Budget, Tree
from sqshforge.image.oci_layout import mismatch
from sqshforge.tar.reader import entries
from sqshforge.tar.stream import TarStream


def scan(layer: Layer, index: int, budget: Budget, meter: Meter) -> Tree:
    """Read a layer whole and check its digests; `WorkError` for anything that is wrong with it."""
    with ThreadPoolExecutor(2) as pool:
        packed = layer.digest if layer.digest != layer.diff_id else None
        blob = Hasher(packed, pool) if packed else None
        content = Hasher(layer.diff_id, pool)
        unpacked = Unpacked(layer, blob.update if blob else None)

        def read() -> bytes:
            data = unpacked.read()
            if data:
                content.update(data)
                meter.count(len(data), layer.where)
            return data

        tree = Tree(index, budget, layer.where)
        window = TarStream(read, layer.where)
        try:
            for entry in entries(window):
                tree.add(entry)
            window.drain()
        except WorkError:
            # Damage is a better reason than what it made of the tar.
            if blob is None and unpacked.is_plain:
                blob = content
                unpacked.raw.see = blob.update
            if blob is not None and not _is_rest_right(unpacked, blob):
                raise mismatch("a layer", layer.where) from None
            raise
        if blob is not None and not _is_rest_right(unpacked, blob):
            raise mismatch("a layer", layer.where)
        if not content.is_right():
            raise mismatch("a layer's content", layer.where)
    layer.region.file.check_unchanged()
    return tree


def top_names(layer: Layer, index: int, only: bytes) -> frozenset[bytes]:
    """The names in the root that a layer touches; reads on only while there is but that one."""
    meter = Meter(layer.region.size)
    unpacked = Unpacked(layer)

    def read() -> bytes:
        data = unpacked.read()
        meter.count(len(data), layer.where)
        return data

    tree = Tree(index, Budget(), layer.where)
    for entry in entries(TarStream(read, layer.where, unpacked.skip)):
        tree.add(entry)
        found = tree.top_names()
        if found - {only}:
            return found
    return tree.top_names()


def _is_rest_right(unpacked: Unpacked, blob: Hasher) -> bool:
    try:
        while unpacked.raw.read(PIECE):
            pass
    except FAULTS:
        return False
    return blob.is_right()
