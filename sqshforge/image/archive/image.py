"""An image in an archive: its config, and its layers checked and merged into one tar."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from sqshforge.errors import RequestError, WorkError
from sqshforge.hot import NONE, HotList
from sqshforge.image.archive import docker_archive, flatten, layer_tree, oci_layout
from sqshforge.image.archive.blobs import Directory, Tarred
from sqshforge.image.archive.layer import FAULTS, PIECE, Hasher, Layer, Meter, Unpacked
from sqshforge.image.archive.layer_tree import Budget, Tree
from sqshforge.image.archive.oci_layout import Image, mismatch
from sqshforge.image.enroot import CARRIED, is_left_out
from sqshforge.tar.reader import entries
from sqshforge.tar.stream import TarStream

SCHEMES = ("oci", "oci-archive", "docker-archive")


@contextlib.contextmanager
def open_image(address: str) -> Iterator[Archive]:
    """Open the image at oci:DIR[:TAG], oci-archive:FILE[:TAG] or docker-archive:FILE[:NAME:TAG].

    Raises `RequestError` if there is none.
    """
    scheme, _, rest = address.partition(":")
    if scheme not in SCHEMES or not rest or "\0" in rest:
        raise RequestError(
            f"{address!r} is not the address of an image in an archive",
            fix="use oci:DIR[:TAG], oci-archive:FILE[:TAG], docker-archive:FILE[:NAME:TAG]",
        )
    path, name = _split(rest)
    with contextlib.ExitStack() as closing:
        if scheme == "docker-archive":
            image = docker_archive.find(Tarred(path, closing), name, address)
        elif scheme == "oci":
            image = oci_layout.find(Directory(path, closing), name, address)
        else:
            image = oci_layout.find(Tarred(path, closing), name, address)
        yield Archive(image, address)


def _split(text: str) -> tuple[Path, str]:
    """Split a text into the longest path that exists, colons included, and the rest."""
    end = len(text)
    while end > 0:
        path = Path(text[:end])
        try:
            if path.exists():
                return path, text[end + 1 :]
        except OSError:  # the name is too long
            pass
        end = text.rfind(":", 0, end)
    raise RequestError(f"{text.partition(':')[0]} does not exist", fix="check the path")


class Archive:
    """An image, read in place; nothing of it is unpacked to the disk.

    `size` is an estimate of its bytes unpacked. `digest` is that of its config, which does not
    depend on the kind of archive or the compression.
    """

    def __init__(self, image: Image, address: str) -> None:
        self._address = address
        self.config: dict[str, Any] = image.document.value
        self.diff_ids = image.diff_ids
        self.digest = f"sha256:{hashlib.sha256(image.config).hexdigest()}"
        self.size = sum(layer.estimate for layer in image.layers)
        self._layers: tuple[Layer, ...] = image.layers
        self._trees: list[Tree] = []
        self._budget = Budget()
        distinct = {layer.region.place: layer.region.size for layer in image.layers}
        self._meter = Meter(sum(distinct.values()))

    def top_names(self, index: int) -> frozenset[bytes]:
        """The names in the root that a layer adds or hides; b"" if it hides everything.

        Reading stops at the first name other than /sqshforge, so the names are complete only if
        there is none. The layer's digest is not checked.
        """
        return layer_top_names(self._layers[index], index, CARRIED.encode())

    def write_tar(
        self,
        out: IO[bytes],
        keep: Callable[[bytes], bool],
        layers: int | None,
        files: Mapping[str, bytes],
        epoch: int,
        advance: Callable[[float], None],
        *,
        xattrs: bool = False,
        devices: bool = True,
        hot: HotList = NONE,
    ) -> list[bytes]:
        """Write the merge of the lowest `layers` layers (None: all) with enroot's changes.

        All of them are read and their digests checked before the first byte is written. `keep`
        selects entries by their paths without a leading slash; the content of a folder that is not
        kept is left out too. `files` replace the image's own; see `flatten.add_enroot_files`.
        `advance` is called with counts of bytes, which for checks and output together add up to the
        size of the image. Files in the list `hot` come first and are returned.
        """
        trees = self._scanned(layers, advance)
        report = advance if trees is None else (lambda amount: advance(amount / 2))
        found = layer_tree.merged(self._trees[:layers])
        names = layer_tree.named(
            found, lambda name: not is_left_out(name) and keep(name), self._address
        )
        if not devices:
            names = flatten.without_devices(names)
        placed = flatten.add_enroot_files(names, files, epoch)
        return flatten.write_flat(
            out, names, placed, self._layers, epoch, report, xattrs=xattrs, hot=hot
        )

    def _scanned(self, layers: int | None, advance: Callable[[float], None]) -> int | None:
        """Read the layers that were not read yet; return how many, or None for none."""
        self._meter.report = lambda amount: advance(amount / 2)
        missing = self._layers[len(self._trees) : layers]
        for layer in missing:
            self._trees.append(scan_layer(layer, len(self._trees), self._budget, self._meter))
        return len(missing) or None


def scan_layer(layer: Layer, index: int, budget: Budget, meter: Meter) -> Tree:
    """Read a whole layer and check its digests; `WorkError` for anything wrong with it."""
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
        stream = TarStream(read, layer.where)
        try:
            for entry in entries(stream):
                tree.add(entry)
            stream.drain()
        except WorkError:
            # Report damage rather than the fault in the tar that it led to.
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


def layer_top_names(layer: Layer, index: int, only: bytes) -> frozenset[bytes]:
    """The names in the root that a layer adds or hides; stops at one other than `only`."""
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
