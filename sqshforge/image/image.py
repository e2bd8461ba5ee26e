"""An image of an archive: its config, and its layers merged into one tar."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import IO, Any

from sqshforge.image import merge, scan, write
from sqshforge.image.docker_export import is_left_out
from sqshforge.image.enroot import CARRIED
from sqshforge.image.flatten import place
from sqshforge.image.layer import Layer, Meter
from sqshforge.image.layer_tree import Budget, Tree
from sqshforge.image.oci_layout import Image


class Archive:
    """An image, read in place; nothing of it is unpacked anywhere.

    `size` is an estimate of its bytes unpacked. `digest` is that of its config: the same in
    whatever kind of archive, and with whatever compression, the image lies.
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
        """The names in the root that a layer touches, hides included; b"" where it hides all.

        They are all of them only where there is no other than /sqshforge: no more is read. The
        layer's digest is not checked.
        """
        return scan.top_names(self._layers[index], index, CARRIED.encode())

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
    ) -> None:
        """Write the merge of the lowest `layers` layers (None: of all) as enroot changes it.

        All of them are read and their digests checked before the first byte is written. `keep`
        says what is taken of it, by paths without a slash in front; what is in a folder that is
        not kept goes with it. `files` replace the image's own; see `place`. `advance` is
        told bytes, of the checks and of the output together as many as the image has.
        """
        trees = self._scanned(layers, advance)
        told = advance if trees is None else (lambda amount: advance(amount / 2))
        found = merge.merged(self._trees[:layers])
        names = merge.named(found, lambda name: not is_left_out(name) and keep(name), self._address)
        placed = place(names, files, epoch)
        write.write(out, names, placed, self._layers, epoch, told, xattrs=xattrs)

    def _scanned(self, layers: int | None, advance: Callable[[float], None]) -> int | None:
        """Read those of the layers that were not yet; None where there were none."""
        self._meter.told = lambda amount: advance(amount / 2)
        missing = self._layers[len(self._trees) : layers]
        for layer in missing:
            self._trees.append(scan.scan(layer, len(self._trees), self._budget, self._meter))
        return len(missing) or None
