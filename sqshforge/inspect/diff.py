"""Compare two squash files."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from sqshforge.errors import shown
from sqshforge.host.terminal import Reporter, Tracker, human
from sqshforge.inspect import packages, shares
from sqshforge.inspect.inspect import environment
from sqshforge.recipe import normalize
from sqshforge.squashfs.content import LENGTH, Content, blocks, fragment
from sqshforge.squashfs.image import Image, open_image
from sqshforge.squashfs.inode import FILE, FOLDER, NONE, Entry

SIGNS = {"removed": "-", "added": "+", "changed": "~"}


@dataclass(frozen=True)
class Change:
    """An entry that differs. A folder that only one file has stands for everything in it."""

    path: bytes
    what: str  # added, removed, changed
    details: tuple[str, ...]
    entries: int = 1
    size: int = 0  # bytes, unpacked; the new size of a changed file


@dataclass(frozen=True)
class Difference:
    """A package or variable whose value differs; None if it is absent."""

    kind: str  # Python package, Debian package, variable
    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Comparison:
    """All differences between two squash files, from `before` to `after`."""

    before: Path
    after: Path
    changes: tuple[Change, ...]
    differences: tuple[Difference, ...]
    times: int  # entries of which only the time differs

    @property
    def equal(self) -> bool:
        """Whether nothing except times differs."""
        return not self.changes and not self.differences

    def json(self) -> str:
        """Return everything as JSON; bytes of a path that are not UTF-8 become surrogates."""
        changes = [{**asdict(one), "path": os.fsdecode(one.path)} for one in self.changes]
        facts = {
            **{"before": str(self.before), "after": str(self.after), "equal": self.equal},
            **{"changes": changes, "times": self.times},
            "differences": [asdict(one) for one in self.differences],
        }
        return json.dumps(facts, indent=2)

    def lines(self) -> list[str]:
        """Return the differences as text, the counts last."""
        lines = []
        for one in self.differences:
            sign = "+" if one.before is None else "-" if one.after is None else "~"
            values = " -> ".join(value for value in (one.before, one.after) if value is not None)
            lines.append(f"{sign} {one.kind} {one.name} {values}")
        lines += [_line(one) for one in self.changes]
        counts = [
            f"{sum(one.entries for one in self.changes if one.what == what)} {what}"
            for what in SIGNS
        ]
        return [*lines, f"entries: {', '.join(counts)}, {self.times} only in their time"]


def _line(one: Change) -> str:
    details = list(one.details)
    if one.what != "changed":
        details = [f"{one.entries} entries"] if one.entries > 1 else []
        details += [human(one.size)] if one.size else []
    return f"{SIGNS[one.what]} /{shown(one.path)}" + (f"  {', '.join(details)}" if details else "")


def compare(before: Path, after: Path, reporter: Reporter) -> Comparison:
    """Compare two squash files, however they are packed.

    Raises `RequestError` if one does not exist or is not a squash file, `WorkError` if one is
    broken.
    """
    with (
        open_image(before) as one,
        open_image(after) as other,
        reporter.track("comparing") as tracker,
    ):
        pair = _Pair(one, other)
        changes, times = pair.changes(tracker)
        return Comparison(before, after, changes, tuple(_differences(one, other)), times)


@dataclass(frozen=True)
class _Pair:
    one: Image
    other: Image

    def changes(self, tracker: Tracker) -> tuple[tuple[Change, ...], int]:
        """Return the entries that differ, sorted by path, and how many differ only in time."""
        old, new = self.one.entries, self.other.entries
        names = (_names(self.one), _names(self.other))
        same = self._same_content(tracker)
        found = [*_whole(old, new, "removed"), *_whole(new, old, "added")]
        times = 0
        for path in old.keys() & new.keys():
            details = tuple(self._details(old[path], new[path], names, path in same))
            if details:
                found.append(Change(path, "changed", details, size=new[path].size))
            elif old[path].mtime != new[path].mtime:
                times += 1
        order = list(SIGNS)
        return tuple(sorted(found, key=lambda one: (one.path, order.index(one.what)))), times

    def _details(
        self,
        old: Entry,
        new: Entry,
        names: tuple[Mapping[int, tuple[bytes, ...]], Mapping[int, tuple[bytes, ...]]],
        same: bool,
    ) -> Iterator[str]:
        if old.kind != new.kind:
            yield f"{old.kind} -> {new.kind}"
            return
        if old.target != new.target:
            yield f"target {shown(old.target)} -> {shown(new.target)}"
        if old.device != new.device:
            yield "device {}:{} -> {}:{}".format(*old.device, *new.device)
        if old.kind == FILE and not same:
            sizes = f" {human(old.size)} -> {human(new.size)}" if old.size != new.size else ""
            yield f"content{sizes}"
        if old.mode != new.mode:
            yield f"mode {old.mode:04o} -> {new.mode:04o}"
        if (old.uid, old.gid) != (new.uid, new.gid):
            yield f"owner {old.uid}:{old.gid} -> {new.uid}:{new.gid}"
        if self.one.xattrs(old) != self.other.xattrs(new):
            yield "extended attributes"
        if names[0].get(old.inode.number) != names[1].get(new.inode.number):
            yield "hard links"

    def _same_content(self, tracker: Tracker) -> set[bytes]:
        """Return the paths whose files have the same content in both images.

        They are read in the order in which the first image stores them.
        """
        old, new = self.one.entries, self.other.entries
        both = [
            (old[path], new[path])
            for path in old.keys() & new.keys()
            if old[path].kind == new[path].kind == FILE and old[path].size == new[path].size
        ]
        tracker.set(0, sum(ours.size for ours, _ in both))
        contents = _Contents(self.one, self.other)
        same = set()
        for ours, theirs in sorted(both, key=lambda pair: _place(pair[0])):
            if contents.equal(ours, theirs):
                same.add(ours.path)
            tracker.advance(ours.size)
        return same


class _Contents:
    """Compares contents, stored bytes first: they are fewer, and need no unpacking."""

    def __init__(self, one: Image, other: Image) -> None:
        self._one, self._other = one, other
        self._contents = Content(one), Content(other)
        self._alike = one.compression == other.compression
        self._fragments: dict[tuple[int, int], bool] = {}

    def equal(self, ours: Entry, theirs: Entry) -> bool:
        return self._stored(ours, theirs) or self._unpacked(ours, theirs)

    def _stored(self, ours: Entry, theirs: Entry) -> bool:
        """Whether the stored bytes are equal; if not, the contents may still be."""
        old, new = ours.inode.data, theirs.inode.data
        if not self._alike or (old.blocks, old.offset) != (new.blocks, new.offset):
            return False
        pairs = zip(blocks(self._one, ours), blocks(self._other, theirs), strict=True)
        if any(self._bytes(a.place, b.place, a.length) for a, b in pairs):
            return False
        return (old.fragment == NONE) == (new.fragment == NONE) and (
            old.fragment == NONE or self._same_fragment(old.fragment, new.fragment)
        )

    def _same_fragment(self, old: int, new: int) -> bool:
        if (old, new) not in self._fragments:
            a, b = fragment(self._one, old), fragment(self._other, new)
            self._fragments[old, new] = a.length == b.length and not self._bytes(
                a.place, b.place, a.length
            )
        return self._fragments[old, new]

    def _bytes(self, old: int, new: int, length: int) -> bool:
        """Whether the stored bytes at two places differ."""
        size = length & LENGTH
        return self._one.reader.at(old, size) != self._other.reader.at(new, size)

    def _unpacked(self, ours: Entry, theirs: Entry) -> bool:
        pieces = (self._contents[0].pieces(ours), self._contents[1].pieces(theirs))
        if self._one.superblock.block == self._other.superblock.block:
            return all(a == b for a, b in zip(*pieces, strict=True))
        return _streams_equal(*pieces)


def _streams_equal(ours: Iterator[bytes], theirs: Iterator[bytes]) -> bool:
    """Whether two streams of equal length, cut into different pieces, are equal."""
    a = b = b""
    while True:
        a = a or next(ours, b"")
        b = b or next(theirs, b"")
        size = min(len(a), len(b))
        if not size:
            return len(a) == len(b)
        if a[:size] != b[:size]:
            return False
        a, b = a[size:], b[size:]


def _place(entry: Entry) -> tuple[int, int, int]:
    data = entry.inode.data
    return (data.fragment, data.offset, data.start)


def _names(image: Image) -> dict[int, tuple[bytes, ...]]:
    """Map inode numbers to sorted paths, for files with several (hard links)."""
    found: dict[int, list[bytes]] = defaultdict(list)
    for path, entry in image.entries.items():
        if entry.kind != FOLDER:
            found[entry.inode.number].append(path)
    return {number: tuple(sorted(paths)) for number, paths in found.items() if len(paths) > 1}


def _whole(
    ones: Mapping[bytes, Entry], others: Mapping[bytes, Entry], what: str
) -> Iterator[Change]:
    """Yield the entries that only `ones` has; everything in such a folder counts with it."""
    tops: dict[bytes, bytes] = {}  # path to the topmost folder that stands for it
    counts: dict[bytes, int] = defaultdict(int)
    sizes: dict[bytes, int] = defaultdict(int)
    for path, entry in ones.items():  # a folder comes before what is in it
        if path not in others:
            top = tops[path] = tops.get(path.rpartition(b"/")[0], path)
            counts[top] += 1
            sizes[top] += entry.size if entry.kind == FILE else 0
    for top, count in counts.items():
        yield Change(top, what, (ones[top].kind,), count, sizes[top])


def _differences(one: Image, other: Image) -> Iterator[Difference]:
    """Yield the packages and variables that differ."""
    found = [_named(one), _named(other)]
    for kind in found[0]:
        old, new = found[0][kind], found[1][kind]
        for name in sorted(old.keys() | new.keys(), key=str.lower):
            if old.get(name) != new.get(name):
                yield Difference(kind, name, old.get(name), new.get(name))


def _named(image: Image) -> dict[str, dict[str, str]]:
    content = Content(image)
    python: dict[str, set[str]] = defaultdict(set)
    for package in packages.python(image, content, shares.of_files(image)):
        python[normalize(package.name)].add(package.version)
    return {
        "Python package": {name: ", ".join(sorted(all_)) for name, all_ in python.items()},
        "Debian package": packages.debian(image, content),
        "variable": environment(image, content),
    }
