"""The files of one layer in whatever order they are asked for.

Engines write a layer in the order of a walk through its folders, which is the order in which files
are asked for: it is read once, from its begin to its end. A file that another tool put elsewhere
is kept back as it is passed, in memory or on the disk, until it is asked for.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import IO

from sqshforge.image.archive.layer import PIECE, Layer, Unpacked
from sqshforge.tar import limits
from sqshforge.tar.reader import Entry, content
from sqshforge.tar.stream import TarStream

IN_MEMORY = 8 << 20  # bytes that are kept back of a layer before a file of TMPDIR takes them
WINDOW = 8 << 20  # bytes that a decoder may keep at least: as many as most compressors ask for
WINDOWS = 256 << 20  # bytes that the decoders of all layers may keep at once


def open_all(
    layers: Mapping[int, Layer], wanted: Mapping[int, list[Entry]]
) -> dict[int, LayerFiles]:
    """The files of several layers, by index.

    A layer whose decoder would take too much memory beside those of the others is unpacked by
    itself, and kept back whole.
    """
    found, total = {}, 0
    for index in sorted(wanted, key=lambda one: (layers[one].window, one)):
        total += layers[index].window
        found[index] = LayerFiles(layers[index], wanted[index], is_alone=total > WINDOWS)
    return found


def _offset(entry: Entry) -> int:
    return entry.offset


class LayerFiles:
    """Gives what a layer has of the entries `wanted`, each once; a context that frees it all.

    `WorkError` where the layer is broken or changes meanwhile.
    """

    def __init__(self, layer: Layer, wanted: Iterable[Entry], *, is_alone: bool) -> None:
        self._layer = layer
        self._is_plain = layer.form == "tar"
        self._is_alone = is_alone  # unpacked before the files of others are
        self._wanted = sorted(wanted, key=lambda entry: entry.offset)
        self._next = 0  # of them, the first that the stream has not reached
        self._stream: TarStream | None = None
        self._kept: IO[bytes] | None = None
        self._places: dict[int, int] = {}  # an entry's offset in the layer to where it is kept

    def __enter__(self) -> LayerFiles:
        return self

    def __exit__(self, *reason: object) -> None:
        self._stream = None
        if self._kept is not None:
            self._kept.close()

    def content(self, entry: Entry) -> Iterator[bytes]:
        """The bytes of a file, holes as zeros; to be taken to their end before the next."""
        if self._is_plain:
            if self._open().position > entry.offset:
                self._stream = None
        elif self._is_alone and self._next == 0:
            self._pass(len(self._wanted))
            self._stream = None
        if entry.offset in self._places:
            return content(entry, self._kept_back(entry))
        if not self._is_plain:
            self._pass(bisect_left(self._wanted, entry.offset, key=_offset))
            self._next += 1
        stream = self._open()
        stream.skip(entry.offset - stream.position)
        return content(entry, stream)

    def _open(self) -> TarStream:
        if self._stream is None:
            most = limits.WINDOW if self._is_alone else max(WINDOW, self._layer.window)
            unpacked = Unpacked(self._layer, window=most)
            self._stream = TarStream(unpacked.read, self._layer.where, unpacked.skip)
        return self._stream

    def _pass(self, end: int) -> None:
        """Go on to one of the entries, and keep back those before it."""
        if end == self._next:
            return
        stream = self._open()
        if self._kept is None:
            self._kept = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115
        for entry in self._wanted[self._next : end]:
            stream.skip(entry.offset - stream.position)
            self._places[entry.offset] = self._kept.seek(0, 2)
            for piece in stream.pieces(entry.stored):
                self._kept.write(piece)
        self._next = end

    def _kept_back(self, entry: Entry) -> TarStream:
        assert self._kept is not None
        kept = self._kept
        kept.seek(self._places.pop(entry.offset))
        return TarStream(lambda: kept.read(PIECE), self._layer.where)
