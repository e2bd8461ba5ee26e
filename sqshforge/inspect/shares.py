"""What takes the space in a squash file: the bytes of each entry."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqshforge.squashfs.content import LENGTH, fragment
from sqshforge.squashfs.image import Image
from sqshforge.squashfs.inode import FILE, NONE, Data

SMALL = 0.02  # share of all stored bytes up to which a part is not listed by itself


@dataclass(frozen=True)
class Share:
    """The size of something, in bytes."""

    stored: int = 0  # in the squash file
    unpacked: int = 0  # in a container

    def __add__(self, other: Share) -> Share:
        return Share(self.stored + other.stored, self.unpacked + other.unpacked)


def of_files(image: Image) -> dict[bytes, Share]:
    """Return the share of every regular file, by path.

    Content that several files have is stored once and counts for the first of them; so does a
    file with several names. The stored bytes of a fragment are divided among the file ends in it
    in proportion to their size.
    """
    names: dict[Data, bytes] = {}
    ends: dict[int, int] = defaultdict(int)  # fragment to bytes of the file ends in it
    first = set()
    for path, entry in image.entries.items():
        if entry.kind == FILE and names.setdefault(entry.inode.data, path) == path:
            first.add(path)
            if entry.inode.data.fragment != NONE:
                ends[entry.inode.data.fragment] += entry.size % image.superblock.block
    found, inodes = {}, set[int]()
    for path, entry in image.entries.items():
        if entry.kind == FILE:
            stored = 0
            unpacked = 0 if entry.inode.number in inodes else entry.size
            inodes.add(entry.inode.number)
            if path in first:
                data = entry.inode.data
                stored = sum(length & LENGTH for length in data.blocks)
                if data.fragment != NONE and ends[data.fragment]:
                    length = fragment(image, data.fragment).length & LENGTH
                    end = entry.size % image.superblock.block
                    stored += round(length * end / ends[data.fragment])
            found[path] = Share(stored, unpacked)
    return found


def top_folders(shares: Mapping[bytes, Share]) -> dict[bytes, Share]:
    """Return each top-level folder's share, largest first; b"" is for top-level files."""
    found: dict[bytes, Share] = defaultdict(Share)
    for path, share in shares.items():
        top, slash, _ = path.partition(b"/")
        found[top if slash else b""] += share
    return _sorted(found.items())


def largest_parts(shares: Mapping[bytes, Share]) -> dict[bytes, Share]:
    """Return the deepest folders and files that are not small, largest first.

    Together they cover everything: `FOLDER/*` is the rest of FOLDER, without its listed parts.
    """
    whole, left = {b"": Share()}, defaultdict[bytes, Share](Share)
    for path, share in shares.items():
        whole[path] = left[path] = share
        while path and (path := path.rpartition(b"/")[0]) not in whole:
            whole[path] = Share()
    paths = sorted(whole, key=_depth, reverse=True)
    for path in paths:  # deepest first, so that each folder is complete when it is added
        if path:
            whole[path.rpartition(b"/")[0]] += whole[path]
    small = SMALL * whole[b""].stored
    found = {}
    for path in paths:
        if path and left[path].stored <= small:
            left[path.rpartition(b"/")[0]] += left[path]
        else:
            rest = path + b"/*" if path else b"*"
            found[path if left[path] == whole[path] else rest] = left[path]
    return _sorted(found.items())


def _depth(path: bytes) -> int:
    return path.count(b"/") + bool(path)


def _sorted(found: Iterable[tuple[bytes, Share]]) -> dict[bytes, Share]:
    return dict(sorted(found, key=lambda one: (-one[1].stored, -one[1].unpacked, one[0])))
