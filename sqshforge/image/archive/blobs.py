"""Stores of an image's blobs: a folder, or a tar that is read in place."""

from __future__ import annotations

import contextlib
import posixpath
import shlex
from pathlib import Path
from typing import Protocol

from sqshforge.errors import RequestError
from sqshforge.image.archive.layer import File, Region, RegionReader, form
from sqshforge.image.archive.layer_tree import split
from sqshforge.tar import limits
from sqshforge.tar.faults import broken, refused, shown, too_much
from sqshforge.tar.reader import FILE, LINK, SYMLINK, entries
from sqshforge.tar.stream import TarStream

READ = 1 << 14  # bytes at once, when only headers are read


class Store(Protocol):
    """Finds the bytes of a blob by name."""

    def region(self, name: str) -> Region | None: ...


class Directory:
    """An OCI layout in a folder."""

    def __init__(self, path: Path, closing: contextlib.ExitStack) -> None:
        if not path.is_dir():
            raise RequestError(
                f"{path} is not a folder", fix="a file's address is oci-archive:FILE"
            )
        self._root = path.resolve()
        self._closing = closing

    def region(self, name: str) -> Region | None:
        try:
            place = (self._root / name).resolve(strict=True)
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError) as error:  # a loop of links can raise either
            raise broken(f"{shown(name)} cannot be read ({error})", str(self._root)) from None
        if not place.is_relative_to(self._root):
            raise refused(
                f"{shown(name)} is a link that leads out of the folder",
                str(self._root),
                "copy the blobs themselves into the folder",
            )
        file = File(place)
        self._closing.callback(file.close)
        return Region(file, 0, file.size)


class Tarred:
    """An archive, whose members are regions of the file."""

    def __init__(self, path: Path, closing: contextlib.ExitStack) -> None:
        self._file = File(path)
        closing.callback(self._file.close)
        self._where = str(path)
        self._regions: dict[str, Region] = {}
        self._links: dict[str, str] = {}
        whole = Region(self._file, 0, self._file.size)
        packed = form(whole)
        if packed != "tar":
            program = {"gzip": "gunzip", "zstd": "unzstd", "bzip2": "bunzip2", "xz": "unxz"}[packed]
            known = path.suffix in (".gz", ".zst", ".bz2", ".xz")
            target = path.with_suffix("") if known else Path(f"{path}.tar")
            raise RequestError(
                f"{path} is compressed with {packed} as a whole, and is read in place",
                fix=f"{program} < {shlex.quote(str(path))} > {shlex.quote(str(target))}",
            )
        reader = RegionReader(whole)
        stream = TarStream(lambda: reader.read(READ), self._where, reader.skip)
        for count, entry in enumerate(entries(stream)):
            if count >= limits.MEMBERS:
                raise too_much(f"it has more than {limits.MEMBERS} members", self._where)
            name = _text(b"/".join(split(entry.name, self._where)))
            self._regions.pop(name, None)
            self._links.pop(name, None)
            if entry.kind == FILE and entry.segments is None:
                self._regions[name] = Region(self._file, entry.offset, entry.size)
            elif entry.kind == LINK:
                self._links[name] = _text(b"/".join(split(entry.target, self._where)))
            elif entry.kind == SYMLINK:
                place = posixpath.join("/", posixpath.dirname(name), _text(entry.target))
                self._links[name] = posixpath.normpath(place).strip("/")

    def region(self, name: str) -> Region | None:
        for _ in range(limits.LINKS):
            if name not in self._links:
                return self._regions.get(name)
            name = self._links[name]
        raise broken(f"the links of {shown(name)} form a loop", self._where)


def _text(name: bytes) -> str:
    return name.decode(errors="surrogateescape")
