"""The files of one layer, in any order in which they are requested.

Engines write a layer in the order of a walk through its folders, and files are requested in that
order: the layer is read once, from start to end. A file that another tool put elsewhere is buffered
when the stream passes it, in memory or on the disk, until it is requested.
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

IN_MEMORY = 8 << 20  # bytes of a layer to buffer in memory before a file in TMPDIR takes them
WINDOW = 8 << 20  # bytes: the window that every decoder may have, as most compressors ask for
WINDOWS = 256 << 20  # bytes: the windows of the decoders of all layers together


def open_all(
    layers: Mapping[int, Layer], wanted: Mapping[int, list[Entry]]
) -> dict[int, LayerFiles]:
    """The files of several layers, by index.

    A layer whose decoder would need too much memory together with the others' is unpacked on its
    own, and all its files are buffered.
    """
    found, total = {}, 0
    for index in sorted(wanted, key=lambda one: (layers[one].window, one)):
        total += layers[index].window
        found[index] = LayerFiles(layers[index], wanted[index], is_alone=total > WINDOWS)
    return found


def _offset(entry: Entry) -> int:
    return entry.offset


class LayerFiles:
    """Gives the content of the entries `wanted` of a layer, each once; a context manager.

    Raises `WorkError` if the layer is broken or changes meanwhile.
    """

    def __init__(self, layer: Layer, wanted: Iterable[Entry], *, is_alone: bool) -> None:
        self._layer = layer
        self._is_plain = layer.form == "tar"
        self._is_alone = is_alone  # unpacked whole at its first file, to free the decoder
        self._wanted = sorted(wanted, key=lambda entry: entry.offset)
        self._next = 0  # the index in it of the first entry that the stream has not reached
        self._stream: TarStream | None = None
        self._kept: IO[bytes] | None = None
        self._places: dict[int, int] = {}  # an entry's offset in the layer -> in the buffer

    def __enter__(self) -> LayerFiles:
        return self

    def __exit__(self, *reason: object) -> None:
        self._stream = None
        if self._kept is not None:
            self._kept.close()

    def content(self, entry: Entry) -> Iterator[bytes]:
        """The bytes of a file, holes as zeros; read them to the end before the next file."""
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
        """Move on to the entry with index `end`, and buffer those before it."""
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
