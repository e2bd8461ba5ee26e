"""Read .zst files to their end or refuse them: the libraries' reader accepts truncated files."""

from __future__ import annotations

import importlib.util
import io
import shutil
from pathlib import Path
from typing import Any

AT_ONCE = 2**17
"""Bytes of a file that are unpacked at a time."""
CUT_OFF = "Compressed file ended before the end-of-stream marker was reached"
"""The message that Python has for truncated .gz, .bz2 and .xz files, too."""


class ZstFile(io.RawIOBase):
    """The unpacked content of a file of one or more frames. Raises EOFError if it ends in one."""

    def __init__(self, file: Any) -> None:
        self._file, self._unpacked, self._at = file, b"", 0
        self._frame: Any = None
        """The frame that has not been read to its end."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._at == len(self._unpacked):
            if not (packed := self._file.read(AT_ONCE)):
                if self._frame is not None:
                    raise EOFError(CUT_OFF)
                return 0
            self._unpacked, self._at = self._unpack(packed), 0
        piece = self._unpacked[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def _unpack(self, packed: bytes) -> bytes:
        import zstandard

        found = []
        while packed:
            frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            found.append(frame.decompress(packed))
            packed = frame.unused_data if frame.eof else b""
            self._frame = None if frame.eof else frame
        return b"".join(found)


def read_zst_whole() -> None:
    """Make datasets read .zst by ZstFile, in streams (through fsspec) and when unpacking files."""
    if not importlib.util.find_spec("zstandard"):
        return  # the library reports that when it needs it
    from datasets.utils.extract import ZstdExtractor
    from fsspec.compression import register_compression

    register_compression("zstd", _opened, "zst", force=True)
    ZstdExtractor.extract = staticmethod(_extract)


def _opened(file: Any, mode: str = "rb", **_: Any) -> io.BufferedReader:
    return io.BufferedReader(ZstFile(file), AT_ONCE)


def _extract(packed: Path | str, unpacked: Path | str) -> None:
    with Path(packed).open("rb") as file, Path(unpacked).open("wb") as target:
        shutil.copyfileobj(ZstFile(file), target, AT_ONCE)
