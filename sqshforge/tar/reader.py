"""Read the entries of a tar in POSIX, GNU or the old format, as Go's reader does.

Engines read layers with Go's archive/tar. What it refuses is refused here too, so that no archive
means one thing to them and another to us.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from sqshforge.tar import limits, sparse
from sqshforge.tar.faults import broken, refused, shown
from sqshforge.tar.stream import TarStream

BLOCK = 512
FILE, LINK, SYMLINK, CHAR, DISK, FOLDER, FIFO = (b"%d" % kind for kind in range(7))
OLD_FILE, CONTIGUOUS, GNU_SPARSE = b"\0", b"7", b"S"
KINDS = frozenset((FILE, LINK, SYMLINK, CHAR, DISK, FOLDER, FIFO))
EXTENDED, GLOBAL, LONG_NAME, LONG_LINK = b"x", b"g", b"L", b"K"
BEFORE = frozenset((EXTENDED, GLOBAL, LONG_NAME, LONG_LINK))
XATTR = b"SCHILY.xattr."
NOTHING = bytes(BLOCK)
PIECE = 1 << 20  # most bytes to pass on at once
ZEROS = bytes(PIECE)
_SECONDS = re.compile(rb"(-?[0-9]{1,18})(\.[0-9]*)?")
_NO_XATTRS: tuple[tuple[bytes, bytes], ...] = ()


class Entry(NamedTuple):
    """One entry, according to its headers."""

    name: bytes
    kind: bytes  # one of KINDS
    mode: int
    mtime: int  # whole seconds since the epoch, not negative
    size: int  # bytes of a file; 0 for everything else
    offset: int  # where its stored data begins in the tar
    target: bytes  # of a link
    device: tuple[int, int]
    xattrs: tuple[tuple[bytes, bytes], ...]
    segments: sparse.Segments | None  # of a file with holes

    @property
    def stored(self) -> int:
        """The bytes of a file that the tar stores: fewer than its size if it has holes."""
        if self.segments is None:
            return self.size
        return sum(count for _, count in self.segments)


def entries(stream: TarStream, *, needs_end_mark: bool = False) -> Iterator[Entry]:
    """Yield the entries up to the end mark.

    Data of an entry that the caller has not read when it asks for the next one is skipped.
    Raises `WorkError` for what Go's reader refuses and, with `needs_end_mark`, for a stream that
    ends without its mark, having been cut off between two entries.
    """
    where = stream.where
    while header := _header(stream, needs_end_mark=needs_end_mark):
        records: list[tuple[bytes, bytes]] = []
        long: dict[bytes, bytes] = {}
        kind = header[156:157]
        while kind in BEFORE:
            size = number(header[124:136], where)
            if not 0 <= size <= limits.HEADER:
                raise refused(
                    f"an extended header of {size} bytes; {limits.HEADER} are the most",
                    where,
                    "build the image anew: no name and no attribute is that long",
                )
            data = stream.take(size + -size % BLOCK)[:size]
            if kind == EXTENDED:
                records = _records(data, where)
            elif kind != GLOBAL:  # engines ignore global headers too
                long[kind] = data.partition(b"\0")[0]
            header = _header(stream)
            if not header:
                raise broken("an extended header has no entry", where)
            kind = header[156:157]
        if records or long or kind not in KINDS:
            entry, stored = _special(stream, header, records, long)
        else:
            entry, stored = _plain(stream, header)
        yield entry
        stream.skip(entry.offset + stored + -stored % BLOCK - stream.position)


def content(entry: Entry, stream: TarStream) -> Iterator[bytes]:
    """Yield a file's bytes from a stream at the start of its data; holes become zeros."""
    return stream.pieces(entry.size) if entry.segments is None else _with_holes(entry, stream)


def _with_holes(entry: Entry, stream: TarStream) -> Iterator[bytes]:
    at = 0
    for begin, count in entry.segments or ():
        yield from _zeros(begin - at)
        yield from stream.pieces(count)
        at = begin + count
    yield from _zeros(entry.size - at)


def _zeros(count: int) -> Iterator[bytes]:
    while count:
        piece = ZEROS[:count]
        yield piece
        count -= len(piece)


def _header(stream: TarStream, *, needs_end_mark: bool = False) -> bytes:
    """Return the next header; b"" at the end of the tar, with or without its mark."""
    header = stream.block(BLOCK)
    if not header and needs_end_mark:
        raise stream.ends_early()
    if header == NOTHING:
        if stream.block(BLOCK) not in (b"", NOTHING):
            raise broken("a block of zeros between the entries of a tar", stream.where)
        return b""
    if header:
        field = header[148:156]
        if number(field, stream.where) != sum(header.rstrip(b"\0")) - sum(field) + 8 * 32:
            raise broken("the checksum of a tar header is wrong", stream.where)
    return header


def _plain(stream: TarStream, header: bytes) -> tuple[Entry, int]:
    """Parse an entry that has no extended headers; return it and the bytes stored."""
    where = stream.where
    kind = header[156:157]
    size = number(header[124:136], where)
    if size < 0:
        raise _negative(where)
    if kind != FILE:
        size = 0  # whatever the header says: no data follows
    target = header[157:257].partition(b"\0")[0] if kind in (LINK, SYMLINK) else b""
    entry = Entry(
        _name(header),
        kind,
        number(header[100:108], where) & 0o7777,
        max(number(header[136:148], where), 0),
        size,
        stream.position,
        target,
        _device(header, where) if kind in (CHAR, DISK) else (0, 0),
        _NO_XATTRS,
        None,
    )
    return entry, size


def _special(
    stream: TarStream,
    header: bytes,
    records: list[tuple[bytes, bytes]],
    long: dict[bytes, bytes],
) -> tuple[Entry, int]:
    """Parse an entry of a rare kind or with extended headers; return it and the bytes stored.

    `records` are those of an extended header; `long` has GNU's long name and link target by kind.
    """
    where = stream.where
    known = dict(records)
    kind = header[156:157]
    name = long.get(LONG_NAME) or known.get(b"path") or _name(header)
    if kind == OLD_FILE:
        kind = FOLDER if name.endswith(b"/") else FILE
    elif kind in (CONTIGUOUS, GNU_SPARSE):
        kind = FILE
    if kind not in KINDS:
        raise refused(
            f"{shown(name)} has an entry type that images do not have ({kind!r})",
            where,
            "leave that file out of the image",
        )
    size = stored = _stated(known.get(b"size"), number(header[124:136], where), where)
    if kind != FILE:
        size = stored = 0
    segments = None
    if kind == FILE:
        if header[156:157] == GNU_SPARSE:
            segments, size = sparse.of_header(header, stream, number)
        elif any(key.startswith(b"GNU.sparse.") for key in known):
            segments, size, used = sparse.of_records(records, stream, size)
            stored -= used
            name = known.get(b"GNU.sparse.name") or name
        if segments is not None:
            sparse.check(segments, size, stored, where)
    seconds = number(header[136:148], where)
    if b"mtime" in known:
        match = _SECONDS.fullmatch(known[b"mtime"])
        if match is None:
            raise broken("an extended header has an invalid time", where)
        seconds = int(match[1])
    target = long.get(LONG_LINK) or known.get(b"linkpath")
    entry = Entry(
        name,
        kind,
        number(header[100:108], where) & 0o7777,
        max(seconds, 0),
        size,
        stream.position,
        target or header[157:257].partition(b"\0")[0],
        _device(header, where) if kind in (CHAR, DISK) else (0, 0),
        tuple(
            (key[len(XATTR) :], value)
            for key, value in sorted(known.items())
            if key.startswith(XATTR)
        ),
        segments,
    )
    return entry, stored


def number(field: bytes, where: str) -> int:
    """Parse a number in a header: octal digits, or binary if the first bit is set."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") & ~(0x80 << 8 * (len(field) - 1))
        return value if not field[0] & 0x40 else value - (0x80 << 8 * (len(field) - 1))
    digits = field.strip(b" \0")
    if not digits:
        return 0
    try:
        if digits.isdigit():
            return int(digits, 8)
    except ValueError:
        pass
    raise broken("a tar header has an invalid number", where)


def _stated(text: bytes | None, otherwise: int, where: str) -> int:
    if text is None:
        size = otherwise
    elif text.isdigit() and len(text) < 20:
        size = int(text)
    else:
        raise broken("an extended header has an invalid size", where)
    if size < 0:
        raise _negative(where)
    return size


def _negative(where: str) -> Exception:
    return broken("a tar entry has a negative size", where)


def _device(header: bytes, where: str) -> tuple[int, int]:
    major, minor = number(header[329:337], where), number(header[337:345], where)
    if not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
        raise broken("a device number is out of Linux's range", where)
    return major, minor


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0" and header[345]:
        return header[345:500].partition(b"\0")[0] + b"/" + name
    return name


def _records(data: bytes, where: str) -> list[tuple[bytes, bytes]]:
    """Parse the records of an extended header: lines that begin with their length (pax(1))."""
    found: list[tuple[bytes, bytes]] = []
    at, end = 0, len(data)
    while at < end:
        space = data.find(b" ", at, at + 8)
        digits = data[at:space]
        length = int(digits) if space > 0 and digits.isdigit() else 0
        line = data[space + 1 : at + length]
        key, is_one, value = line[:-1].partition(b"=")
        if not is_one or not key or line[-1:] != b"\n" or at + length > end:
            raise broken("an extended header has an invalid record", where)
        if b"\0" in key or (b"\0" in value and key in (b"path", b"linkpath", b"GNU.sparse.name")):
            raise broken("a name in an extended header contains a NUL byte", where)
        found.append((key, value))
        at += length
    return found
