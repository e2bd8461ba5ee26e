"""What enroot changes of an image's tree, done to an engine's flat tar as it passes.

Devices and docker's marker are left out, modes are widened so that the owner can read
everything, and the four files of enroot take the place of the image's own. Owners and extended
attributes are mksquashfs's to drop.

The headers are read as bytes, not by `tarfile`: an image has 50,000 of them, and two processors
that are busy with compression should not wait for a copy of what hardly ever changes.
"""

from __future__ import annotations

import io
import os
import posixpath
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import IO, cast

from sqshforge.errors import WorkError
from sqshforge.image.enroot import CARRIED

TAIL = os.fsencode(CARRIED)  # the top folder that a split leaves out
PIECE = 1 << 20
BLOCK = 512
LONGEST = 1 << 20  # of an extended header, in bytes: names have 4096 at most

LINK, SYMLINK, FOLDER = b"1", b"2", b"5"
FILES = (b"0", b"\0", b"7")
EXTENDED, LONG_NAME, LONG_LINK = b"x", b"L", b"K"
GLOBAL, SPARSE = b"g", b"S"
XATTR = b"SCHILY.xattr."


@dataclass(frozen=True)
class Entry:
    """One entry of a tar: what its headers say, and the headers themselves."""

    name: bytes  # without a slash at either end
    kind: bytes
    mode: int
    size: int  # of the data that follows, in bytes
    mtime: int
    target: bytes
    extended: bytes  # the headers before its own, for what does not fit into that
    header: bytes


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
    told the bytes as they pass. /sqshforge is left out where it is `split` off. Raises
    `WorkError` for a broken stream.
    """
    _Copy(source, target, files, epoch, advance, split=split, xattrs=xattrs).run()


def is_left_out(name: bytes) -> bool:
    """Whether an entry is one that enroot does not take over."""
    return name.startswith(b"dev/") or name == b".dockerenv"


class _Copy:
    def __init__(
        self,
        source: IO[bytes],
        target: IO[bytes],
        files: Mapping[str, bytes],
        epoch: int,
        advance: Callable[[float], None],
        *,
        split: bool,
        xattrs: bool,
    ) -> None:
        self._in = io.BufferedReader(cast(io.RawIOBase, source), PIECE)
        self._out = io.BufferedWriter(cast(io.RawIOBase, _Kept(target)), PIECE)
        self._files = {os.fsencode(name): data for name, data in files.items()}
        self._epoch = epoch
        self._advance = advance
        self._split = split
        self._xattrs = xattrs
        self._folders: set[bytes] = set()
        self._replaced: set[bytes] = set(self._files)  # where the image's own files are left out
        self._etc: Entry | None = None  # where it is a link: kept back until all is known
        self._home = b"etc"  # where that leads
        self._dropped = _Dropped()

    def run(self) -> None:
        with self._dropped:
            while (entry := self._next()) is not None:
                if entry.kind == SYMLINK and entry.name == b"etc":
                    self._etc, self._home = entry, _within(entry)
                    self._replaced = {self._home + name[3:] for name in self._files}
                elif self._is_dropped(entry.name):
                    self._drop(entry)
                elif entry.name:
                    self._pass(self._dropped.stand_in(entry))
                else:
                    self._skip(entry.size)
            self._add_files()
        self._out.write(bytes(2 * BLOCK))
        self._out.flush()
        shutil.copyfileobj(self._in, _Nowhere())
        self._in.detach()  # else it would close what it reads from

    def _is_dropped(self, name: bytes) -> bool:
        if is_left_out(name) or name in self._replaced:
            return True
        if self._split and (name == TAIL or name.startswith(TAIL + b"/")):
            return True
        return b"/" in name and any(
            name.startswith(one) and name[len(one) : len(one) + 1] == b"/" for one in self._replaced
        )

    def _pass(self, entry: Entry) -> None:
        if entry.kind == FOLDER:
            self._folders.add(entry.name)
            # Things are put in there and taken out.
            mtime = self._epoch if entry.name in (b"dev", self._home) else entry.mtime
            entry = _with(entry, entry.mode | 0o700, mtime)
        elif entry.kind in FILES:
            entry = _with(entry, entry.mode | 0o400, entry.mtime)
        self._out.write(entry.extended)
        self._out.write(entry.header)
        kept = self._dropped.content_of(entry)
        if kept is None:
            self._data(entry.size, self._out)
        else:
            shutil.copyfileobj(kept, self._out)
            self._out.write(bytes(-entry.size % BLOCK))

    def _drop(self, entry: Entry) -> None:
        """Keep what further hard links may need; without them it is forgotten in the end."""
        if entry.kind in FILES:
            copy = tempfile.SpooledTemporaryFile(max_size=PIECE)  # noqa: SIM115
            self._data(entry.size, cast(IO[bytes], copy))
            copy.truncate(entry.size)
            self._dropped.add_file(entry, cast(IO[bytes], copy))
        else:
            if entry.kind == LINK:
                self._dropped.add_link(entry)
            self._skip(entry.size)

    def _add_files(self) -> None:
        home = b"etc"
        if self._etc is not None and self._home in self._folders:
            self._pass(self._etc)
            home = self._home
        if home not in self._folders:
            self._add(b"etc", tarfile.DIRTYPE, 0o755, b"")
        for name, data in sorted(self._files.items()):
            self._add(home + name[3:], tarfile.REGTYPE, 0o644, data)

    def _add(self, name: bytes, kind: bytes, mode: int, data: bytes) -> None:
        entry = tarfile.TarInfo(os.fsdecode(name))
        entry.type, entry.mode, entry.mtime, entry.size = kind, mode, self._epoch, len(data)
        self._out.write(_headers(entry) + data + bytes(-len(data) % BLOCK))

    def _next(self) -> Entry | None:
        """The next entry; None at the end mark."""
        records: dict[bytes, bytes] = {}
        while True:
            header = self._exactly(BLOCK)
            if not header.rstrip(b"\0"):
                return None
            kind, size = header[156:157], _number(header[124:136])
            if kind == GLOBAL:
                self._skip(size)
                continue
            if kind not in (EXTENDED, LONG_NAME, LONG_LINK):
                break
            if size > LONGEST:
                raise _broken("an extended header of more than a megabyte")
            data = self._exactly(size + -size % BLOCK)
            if kind == EXTENDED:
                records.update(_records(data[:size]))
            else:
                records[b"path" if kind == LONG_NAME else b"linkpath"] = data[:size].rstrip(b"\0")
        if int(header[148:156].rstrip(b"\0 ") or b"0", 8) != _checksum(header):
            raise _broken("a header's checksum is wrong")
        if kind == SPARSE or any(name.startswith(b"GNU.sparse.") for name in records):
            raise _broken("a sparse entry, which no engine writes")
        name = records.get(b"path", _name(header))
        if kind in FILES and name.endswith(b"/"):
            kind = FOLDER
        entry = Entry(
            name=_plain(name),
            kind=kind,
            mode=_number(header[100:108]),
            size=int(records.get(b"size", size)) if kind in FILES else 0,
            mtime=int(float(records.get(b"mtime", _number(header[136:148])))),
            target=records.get(b"linkpath", header[157:257].partition(b"\0")[0]),
            extended=b"",
            header=header,
        )
        if not records:
            return entry
        # Mksquashfs 4.5 takes a link's target from the header, and not from the record.
        entry = _renamed(entry, entry.name, entry.target)
        kept = {name: data for name, data in records.items() if name.startswith(XATTR)}
        if kept and self._xattrs:
            return replace(entry, extended=_attributes(kept) + entry.extended)
        return entry

    def _exactly(self, size: int) -> bytes:
        data = self._in.read(size)
        if len(data) != size:
            raise _broken("it ends before its end mark")
        return data

    def _data(self, size: int, target: IO[bytes] | io.BufferedWriter) -> None:
        """Copy an entry's data and what fills its last block up."""
        left = size + -size % BLOCK
        while left:
            piece = self._exactly(min(left, PIECE))
            target.write(piece)
            left -= len(piece)
            self._advance(len(piece))

    def _skip(self, size: int) -> None:
        self._data(size, cast(IO[bytes], _Nowhere()))


class _Dropped:
    """Files whose first name is left out: their content lives on under their other hard links."""

    def __init__(self) -> None:
        self._files: dict[bytes, tuple[Entry, IO[bytes]]] = {}
        self._now: dict[bytes, bytes] = {}  # a name that was left out to one of the same file
        self._taken: dict[bytes, IO[bytes]] = {}

    def __enter__(self) -> None:
        pass

    def __exit__(self, *why: object) -> None:
        for _, content in self._files.values():
            content.close()

    def add_file(self, entry: Entry, content: IO[bytes]) -> None:
        self._files[entry.name] = (entry, content)

    def add_link(self, entry: Entry) -> None:
        self._now[entry.name] = _plain(entry.target)

    def stand_in(self, entry: Entry) -> Entry:
        """The entry itself, or the file that was left out and that it is the next link to."""
        if entry.kind != LINK or not (self._now or self._files):
            return entry
        target = first = _plain(entry.target)
        while target in self._now:
            target = self._now[target]
        if target in self._files:
            file, content = self._files.pop(target)
            content.seek(0)
            self._now[target] = entry.name
            self._taken[entry.name] = content
            return _renamed(file, entry.name)
        return entry if target == first else _renamed(entry, entry.name, target)

    def content_of(self, entry: Entry) -> IO[bytes] | None:
        return self._taken.pop(entry.name, None) if self._taken else None


def _renamed(entry: Entry, name: bytes, target: bytes = b"") -> Entry:
    """An entry with new headers, in GNU's format, of another name or to another target."""
    info = tarfile.TarInfo(os.fsdecode(name))
    info.type = entry.kind
    info.mode, info.size, info.mtime = entry.mode, entry.size, entry.mtime
    info.devmajor, info.devminor = (_number(entry.header[at : at + 8]) for at in (329, 337))
    info.linkname = os.fsdecode(target)
    raw = _headers(info)
    return replace(entry, name=name, target=target, extended=raw[:-BLOCK], header=raw[-BLOCK:])


def _attributes(records: Mapping[bytes, bytes]) -> bytes:
    """An extended header of these records: a line each, its length in front (pax(1))."""
    data = b""
    for name, value in records.items():
        rest = len(name) + len(value) + 3  # a space, an equals sign, a newline
        length = rest + len(str(rest + len(str(rest))))
        data += b"%d %s=%s\n" % (length, name, value)
    info = tarfile.TarInfo("xattrs")
    info.type, info.size = tarfile.XHDTYPE, len(data)
    return _headers(info) + data + bytes(-len(data) % BLOCK)


def _headers(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _with(entry: Entry, mode: int, mtime: int) -> Entry:
    if (mode, mtime) == (entry.mode, entry.mtime):
        return entry
    header = bytearray(entry.header)
    header[100:108] = b"%07o\0" % mode
    header[136:148] = b"%011o\0" % mtime
    header[148:156] = b"%06o\0 " % _checksum(header)
    return replace(entry, mode=mode, mtime=mtime, header=bytes(header))


def _checksum(header: bytes | bytearray) -> int:
    """The sum of a header's bytes, its own field taken as spaces."""
    return sum(header) - sum(header[148:156]) + 8 * 32


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0" and header[345:346] != b"\0":
        return header[345:500].partition(b"\0")[0] + b"/" + name
    return name


def _number(field: bytes) -> int:
    """A header's number: octal digits, or two's complement after a byte that says so."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x3F]) + field[1:], "big")
    digits = field.strip(b" \0")
    try:
        return int(digits or b"0", 8)
    except ValueError:
        raise _broken("a header's number is none") from None


def _records(data: bytes) -> dict[bytes, bytes]:
    """The records of an extended header: a line each, its length in front (pax(1))."""
    found, rest = {}, data
    while rest.strip(b"\0"):
        length = rest.partition(b" ")[0]
        line = rest[: int(length)] if length.isdigit() else b""
        name, is_one, value = line[len(length) + 1 : -1].partition(b"=")
        if not is_one or not line.endswith(b"\n"):
            raise _broken("a record of an extended header is none")
        found[name] = value
        rest = rest[len(line) :]
    return found


def _plain(name: bytes) -> bytes:
    while name.startswith(b"./"):
        name = name[2:]
    return b"" if name == b"." else name.strip(b"/")


def _within(link: Entry) -> bytes:
    """Where a link of the top folder leads, seen as a path without a slash in front."""
    return posixpath.normpath(b"/" + link.target).strip(b"/")


def _broken(why: str) -> WorkError:
    return WorkError(f"the image's tar stream is broken: {why}")


class _Kept(io.RawIOBase):
    """A file that stays open when what writes through it is closed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        return self._file.write(cast(bytes, data))


class _Nowhere(io.RawIOBase):
    """Takes what stands after a tar's end mark, so that the writer is not cut off."""

    def write(self, data: object) -> int:
        return len(data)  # type: ignore[arg-type]
