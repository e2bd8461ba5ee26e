"""What enroot changes of an image's tree, done to an engine's flat tar as it passes.

Devices and docker's marker are left out, modes are widened so that the owner can read
everything, and the four files of enroot take the place of the image's own.
"""

from __future__ import annotations

import os
import posixpath
import tempfile
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, cast

from sqshforge.image.enroot import CARRIED
from sqshforge.tar.reader import FILE, FOLDER, LINK, SYMLINK, Entry, content, entries
from sqshforge.tar.stream import TarStream
from sqshforge.tar.writer import PIECE, Output, made

PAYLOAD = os.fsencode(CARRIED)  # the top folder that a split leaves out


def copy(
    source: IO[bytes],
    target: IO[bytes],
    files: Mapping[str, bytes],
    epoch: int,
    advance: Callable[[float], None],
    *,
    split: bool = False,
    xattrs: bool = False,
) -> None:
    """Copy a tar from source to target with the changes above.

    `files` maps paths to the contents of mode-0644 files; `epoch` is their time; `advance` is
    told the bytes of files as they pass. /sqshforge is left out where it is `split` off. Raises
    `WorkError` for a broken stream.
    """
    stream = TarStream(lambda: source.read(PIECE), "the engine's export of the image")
    output = Output(target, xattrs=xattrs)
    with _Export(stream, output, files, epoch, advance, split=split) as export:
        export.run()


def is_left_out(name: bytes) -> bool:
    """Whether an entry is one that enroot does not take over."""
    return name.startswith(b"dev/") or name == b".dockerenv"


class _Export:
    def __init__(
        self,
        stream: TarStream,
        output: Output,
        files: Mapping[str, bytes],
        epoch: int,
        advance: Callable[[float], None],
        *,
        split: bool,
    ) -> None:
        self._stream = stream
        self._output = output
        self._files = {os.fsencode(name): data for name, data in files.items()}
        self._epoch = epoch
        self._advance = advance
        self._split = split
        self._folders: set[bytes] = set()
        self._replaced: set[bytes] = set(self._files)  # where the image's own files are left out
        self._etc: Entry | None = None  # where it is a link: kept back until all is known
        self._home = b"etc"  # where that leads
        # Files whose first name is left out: their content lives on under their other hard links.
        self._dropped: dict[bytes, tuple[Entry, IO[bytes]]] = {}
        self._renamed: dict[bytes, bytes] = {}  # a name that was left out to one of the same file

    def __enter__(self) -> _Export:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, where: TracebackType | None
    ) -> None:
        for _, kept in self._dropped.values():
            kept.close()

    def run(self) -> None:
        for entry in entries(self._stream, needs_end_mark=True):
            name = _plain(entry.name)
            if entry.kind == SYMLINK and name == b"etc":
                self._etc, self._home = entry, _inside(entry.target)
                self._replaced = {self._home + one[3:] for one in self._files}
            elif self._is_dropped(name):
                self._drop(name, entry)
            elif entry.kind == LINK:
                self._link(name, entry)
            elif name:
                self._pass(name, entry)
        self._add_files()
        self._output.end()
        self._stream.drain()  # else the engine would be cut off while it writes

    def _is_dropped(self, name: bytes) -> bool:
        if is_left_out(name) or name in self._replaced:
            return True
        if self._split and (name == PAYLOAD or name.startswith(PAYLOAD + b"/")):
            return True
        return b"/" in name and any(name.startswith(one + b"/") for one in self._replaced)

    def _pass(self, name: bytes, entry: Entry) -> None:
        if entry.kind == FOLDER:
            self._folders.add(name)
            if name in (b"dev", self._home):  # things are put in there and taken out
                entry = entry._replace(mtime=self._epoch)
        self._output.header(entry, name)
        if entry.size:
            for piece in content(entry, self._stream):
                self._output.data(piece)
                self._advance(len(piece))
            self._output.fill(entry.size)

    def _link(self, name: bytes, entry: Entry) -> None:
        """Pass a hard link: where what it names was left out, it takes the place of that."""
        target = _plain(entry.target)
        while target in self._renamed:
            target = self._renamed[target]
        if target not in self._dropped:
            self._output.header(entry._replace(target=target), name)
            return
        file, kept = self._dropped.pop(target)
        self._renamed[target] = name
        with kept:
            kept.seek(0)
            self._output.header(file, name)
            while piece := kept.read(PIECE):
                self._output.data(piece)
        self._output.fill(file.size)

    def _drop(self, name: bytes, entry: Entry) -> None:
        """Leave an entry out, and keep what further hard links may need of it."""
        if entry.kind == LINK:
            self._renamed[name] = _plain(entry.target)
        elif entry.kind == FILE:
            kept = tempfile.SpooledTemporaryFile(max_size=PIECE)  # noqa: SIM115
            for piece in content(entry, self._stream):
                kept.write(piece)
                self._advance(len(piece))
            self._dropped[name] = entry, cast(IO[bytes], kept)

    def _add_files(self) -> None:
        home = b"etc"
        if self._etc is not None and self._home in self._folders:
            self._output.header(self._etc, b"etc")
            home = self._home
        if home not in self._folders:
            self._output.header(made(b"etc", FOLDER, 0o755, self._epoch), b"etc")
        for path, data in sorted(self._files.items()):
            name = home + path[3:]
            self._output.header(made(name, FILE, 0o644, self._epoch, len(data)), name)
            self._output.data(data)
            self._output.fill(len(data))


def _plain(name: bytes) -> bytes:
    while name.startswith(b"./"):
        name = name[2:]
    return b"" if name == b"." else name.strip(b"/")


def _inside(target: bytes) -> bytes:
    """Where a link of the top folder leads, seen as a path without a slash in front."""
    return posixpath.normpath(b"/" + target).strip(b"/")
