"""Unpack the blocks of a squash file, never to more than their expected size."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable

from sqshforge.errors import RequestError

NAMES = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}
MEMORY = 64 << 20  # bytes that unpacking one lzma or xz block may use

# Takes a block and the most bytes that it may unpack to; any exception means that it is broken.
Unpack = Callable[[bytes, int], bytes]


def unpacker(number: int) -> Unpack:
    """Return the function for a compression by its number in the superblock.

    Raises `RequestError` for an unknown number.
    """
    if number not in NAMES:
        raise RequestError(f"the squash file's compression is unknown (number {number})")
    return {1: _gzip, 2: _lzma, 3: _lzo, 4: _xz, 5: _lz4, 6: _zstd}[number]


def _gzip(data: bytes, most: int) -> bytes:
    one = zlib.decompressobj()
    found = one.decompress(data, most)
    if not one.eof:
        raise ValueError("it is larger, or cut short")
    return found


def _lzma(data: bytes, most: int) -> bytes:
    return lzma.LZMADecompressor(lzma.FORMAT_ALONE, MEMORY).decompress(data, most)


def _xz(data: bytes, most: int) -> bytes:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, MEMORY).decompress(data, most)


def _lzo(data: bytes, most: int) -> bytes:
    import lzallright

    return bytes(lzallright.LZOCompressor.decompress(data, output_size_hint=most))


def _lz4(data: bytes, most: int) -> bytes:
    import lz4.block

    return bytes(lz4.block.decompress(data, uncompressed_size=most))


def _zstd(data: bytes, most: int) -> bytes:
    import zstandard

    # The library allocates the memory that a block says it needs.
    size = zstandard.frame_content_size(data)
    if size > most:
        raise ValueError("it is larger")
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=most)
