"""Hot lists, in recipes/hot: the files of an image that a start reads, in order of first use.

A list is text with one path per line. A `*` stands for what changes with each update of a package,
so that the list also holds for the next version:

    usr/lib/x86_64-linux-gnu/libc.so.*
    usr/local/lib/python3.*/dist-packages/torch-*.dist-info/METADATA

A line names every file whose path equals it once the versions in the path are replaced.

An image packed with a list has these files first, in the list's order, followed by all others in
the order of a walk through its folders.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqshforge.errors import RequestError

COMMENT = "#"
# What stars replace, in this order; replacing again changes nothing.
VERSIONS = (
    # torch-2.13.0+cpu.dist-info, six-1.16.0-py3.11.egg-info
    (re.compile(r"-\d[^/]*(?=\.(?:dist|egg)-info(?:/|$))"), "-*"),
    (re.compile(r"(?<=\.so)(?:\.\d+)+(?=$|/)"), ".*"),  # libz.so.1.2.13
    (re.compile(r"(?<=python3)\.\d+"), ".*"),  # python3.11, libpython3.11.so
    (re.compile(r"(?<=\.cpython-)\d+"), "*"),  # module.cpython-311.pyc
    (re.compile(r"-\d+(?:\.\d+)+"), "-*"),  # libbfd-2.40-system.so
    # libgomp-a34b3233.so.1: auditwheel adds a hash of the content
    (re.compile(r"-(?=[a-f]*\d)[0-9a-f]{8}(?=[-.][^/]*$)"), "-*"),
)


def generalized(path: str) -> str:
    """Return a path with a star in place of each version."""
    for pattern, replacement in VERSIONS:
        path = pattern.sub(replacement, path)
    return path


@dataclass(frozen=True)
class HotList:
    """Generalized paths, relative to the image's root, in order of first use."""

    lines: tuple[str, ...] = ()

    @classmethod
    def of(cls, paths: Iterable[str]) -> HotList:
        """Make a list of paths in order of first use; those that no line can hold are left out."""
        found = (generalized(path.strip("/")) for path in paths)
        return cls(tuple(dict.fromkeys(one for one in found if _can_be_a_line(one))))

    @classmethod
    def parse(cls, text: str) -> HotList:
        """Parse a list, which people may have written.

        Its lines may end with CR LF, begin with a slash, and name versions.
        """
        lines = (line.removesuffix("\r") for line in text.split("\n"))
        return cls.of(line for line in lines if not line.startswith(COMMENT))

    @classmethod
    def read(cls, path: Path) -> HotList:
        """Read a list from a file; `RequestError` if it cannot be read."""
        try:
            return cls.parse(os.fsdecode(path.read_bytes()))
        except OSError as error:
            raise RequestError(
                f"the list of hot files cannot be read: {error.strerror}",
                where=str(path),
                fix="sqshforge trace TARGET writes one",
            ) from None

    def text(self, *comments: str) -> bytes:
        """Return the content of a file with the list, below comments."""
        lines = [*(f"{COMMENT} {one}" for one in comments), *self.lines]
        return os.fsencode("".join(f"{line}\n" for line in lines))

    @property
    def digest(self) -> str | None:
        """A digest of the paths and their order; None for an empty list."""
        if not self.lines:
            return None
        return f"sha256:{hashlib.sha256(self.text()).hexdigest()}"

    def found(self, paths: Iterable[bytes]) -> list[bytes]:
        """Return those of an image's paths that are in the list, in its order.

        Paths that the same line names keep their order.
        """
        named: dict[str, list[bytes]] = defaultdict(list)
        wanted = set(self.lines)
        for path in paths if wanted else ():
            line = generalized(os.fsdecode(path))
            if line in wanted:
                named[line].append(path)
        return [path for line in self.lines for path in named.get(line, ())]

    def missing(self, paths: Iterable[bytes]) -> list[str]:
        """Return the lines that name none of an image's paths."""
        there = {generalized(os.fsdecode(path)) for path in paths}
        return [line for line in self.lines if line not in there]


NONE = HotList()


def walk_order(name: bytes) -> bytes:
    """Return the key that sorts paths in the order of a walk: a folder, then everything in it."""
    return name.replace(b"/", b"\0")


def hot_first(hot: HotList, files: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Split an image's files (in walk order) into hot ones (in the list's order) and the rest."""
    first = hot.found(files)
    taken = set(first)
    return first, [path for path in files if path not in taken]


def _can_be_a_line(path: str) -> bool:
    return bool(path) and "\n" not in path and not path.startswith(COMMENT)
