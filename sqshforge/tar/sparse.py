"""Sparse files: parse the maps that say where in a file its stored bytes belong.

GNU tar has had four formats for them. Docker's own layers have no sparse files; those of other
tools may.
"""

from __future__ import annotations

from collections.abc import Callable

from sqshforge.tar import limits
from sqshforge.tar.faults import broken, too_much
from sqshforge.tar.stream import TarStream

Segments = tuple[tuple[int, int], ...]  # offset in the file, number of bytes
BLOCK = 512
_MOST = limits.HEADER // 8  # most segments


def of_header(
    header: bytes, stream: TarStream, number: Callable[[bytes, str], int]
) -> tuple[Segments, int]:
    """Parse the map in a header of type S and the blocks after it; return it and the real size."""
    where = stream.where
    found = _fields(header[386:482], number, where)
    size = number(header[483:495], where)
    more = header[482]
    while more:
        if len(found) > _MOST:
            raise _too_many(where)
        block = stream.take(BLOCK)
        found += _fields(block[:504], number, where)
        more = block[504]
    return tuple(found), size


def of_records(
    records: list[tuple[bytes, bytes]], stream: TarStream, size: int
) -> tuple[Segments, int, int]:
    """Parse the map in extended headers, or at the start of the data (format 1.0).

    Return it, the file's real size, and the bytes of the data that the map took.
    """
    where = stream.where
    known = dict(records)
    real = known.get(b"GNU.sparse.realsize", known.get(b"GNU.sparse.size"))
    whole = size if real is None else _number(real, where)
    if b"GNU.sparse.major" in known:
        version = known[b"GNU.sparse.major"], known.get(b"GNU.sparse.minor")
        if version != (b"1", b"0"):
            raise broken("a sparse file has an unknown format", where)
        numbers, used = _lines(stream, size)
        return _pairs(numbers, where), whole, used
    if b"GNU.sparse.map" in known:
        text = known[b"GNU.sparse.map"]
        numbers = [_number(one, where) for one in text.split(b",")] if text else []
    else:
        order = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")
        given = [(key, value) for key, value in records if key in order]
        if any(key != order[index % 2] for index, (key, _) in enumerate(given)):
            raise broken("a sparse file has an invalid map", where)
        numbers = [_number(value, where) for _, value in given]
    return _pairs(numbers, where), whole, 0


def check(segments: Segments, size: int, stored: int, where: str) -> None:
    """Refuse a map whose segments overlap, exceed the file, or do not add up to what is stored."""
    end = 0
    for offset, count in segments:
        if offset < end or count < 0:
            raise broken("the segments of a sparse file overlap", where)
        end = offset + count
    if end > size or size < 0 or sum(count for _, count in segments) != stored:
        raise broken("the segments of a sparse file do not add up to its size", where)


def _fields(data: bytes, number: Callable[[bytes, str], int], where: str) -> list[tuple[int, int]]:
    found = []
    for at in range(0, len(data), 24):
        if not data[at]:
            break
        pair = number(data[at : at + 12], where), number(data[at + 12 : at + 24], where)
        found.append(pair)
    return found


def _lines(stream: TarStream, size: int) -> tuple[list[int], int]:
    """Read the map at the data's start: a decimal number per line, the first the count of pairs.

    Return the numbers after the first, and the bytes read.
    """
    where = stream.where
    text, used = b"", 0
    wanted = 1
    lines: list[bytes] = []
    while len(lines) < wanted:
        if used + BLOCK > size + -size % BLOCK:
            raise broken("a sparse file has an invalid map", where)
        if used >= limits.HEADER:
            raise _too_many(where)
        *more, text = (text + stream.take(BLOCK)).split(b"\n")
        used += BLOCK
        lines += more
        if lines:
            wanted = 1 + 2 * _number(lines[0], where)
    return [_number(one, where) for one in lines[1:wanted]], used


def _pairs(numbers: list[int], where: str) -> Segments:
    if len(numbers) % 2:
        raise broken("a sparse file has an invalid map", where)
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def _number(text: bytes, where: str) -> int:
    if not text.isdigit() or len(text) > 19:
        raise broken("a sparse file's map has an invalid number", where)
    return int(text)


def _too_many(where: str) -> Exception:
    return too_much(f"a sparse file in more than {_MOST} pieces", where)
