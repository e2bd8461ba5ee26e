"""Which files of an image a start reads, in which order: the lists in recipes/hot.

A list is text, one path a line, sorted by first use. What changes with each update of a package is
a `*` in it, so that a list holds for the next version too:

    usr/lib/x86_64-linux-gnu/libc.so.*
    usr/local/lib/python3.*/dist-packages/torch-*.dist-info/METADATA

A line names every file whose path is that line once its own versions are replaced.

An image that is packed by a list has these files first, in that order, and all others after them in
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
# What is replaced by a star, in this order; each leaves what it has made as it is.
VERSIONS = (
    # torch-2.13.0+cpu.dist-info, six-1.16.0-py3.11.egg-info
    (re.compile(r"-\d[^/]*(?=\.(?:dist|egg)-info(?:/|$))"), "-*"),
    (re.compile(r"(?<=\.so)(?:\.\d+)+(?=$|/)"), ".*"),  # libz.so.1.2.13
    (re.compile(r"(?<=python3)\.\d+"), ".*"),  # python3.11, libpython3.11.so
    (re.compile(r"(?<=\.cpython-)\d+"), "*"),  # module.cpython-311.pyc
    (re.compile(r"-\d+(?:\.\d+)+"), "-*"),  # libbfd-2.40-system.so
    # libgomp-a34b3233.so.1: a sum of its content, which auditwheel gives it
    (re.compile(r"-(?=[a-f]*\d)[0-9a-f]{8}(?=[-.][^/]*$)"), "-*"),
)


def generalized(path: str) -> str:
    """A path with a star for each version in it."""
    for pattern, replacement in VERSIONS:
        path = pattern.sub(replacement, path)
    return path


@dataclass(frozen=True)
class HotList:
    """Paths from the image's top folder, generalized, the first used first."""

    lines: tuple[str, ...] = ()

    @classmethod
    def of(cls, paths: Iterable[str]) -> HotList:
        """The list of paths in the order of their first use; what no line can hold is left out."""
        found = (generalized(path.strip("/")) for path in paths)
        return cls(tuple(dict.fromkeys(one for one in found if _can_be_a_line(one))))

    @classmethod
    def parse(cls, text: str) -> HotList:
        """The list that a text holds, also one that people wrote.

        Its lines may end as Windows ends them, begin at the root, and name versions.
        """
        lines = (line.removesuffix("\r") for line in text.split("\n"))
        return cls.of(line for line in lines if not line.startswith(COMMENT))

    @classmethod
    def read(cls, path: Path) -> HotList:
        """The list in a file; `RequestError` where there is none."""
        try:
            return cls.parse(os.fsdecode(path.read_bytes()))
        except OSError as error:
            raise RequestError(
                f"the list of hot files cannot be read: {error.strerror}",
                where=str(path),
                fix="sqshforge trace TARGET writes one",
            ) from None

    def text(self, *comments: str) -> bytes:
        """The list as a file has it, below comments."""
        lines = [*(f"{COMMENT} {one}" for one in comments), *self.lines]
        return os.fsencode("".join(f"{line}\n" for line in lines))

    @property
    def digest(self) -> str | None:
        """A digest of the paths and their order; None for no list."""
        if not self.lines:
            return None
        return f"sha256:{hashlib.sha256(self.text()).hexdigest()}"

    def found(self, paths: Iterable[bytes]) -> list[bytes]:
        """Those of an image's paths that are in the list, in its order.

        Several that one line names keep the order that they come in.
        """
        named: dict[str, list[bytes]] = defaultdict(list)
        wanted = set(self.lines)
        for path in paths if wanted else ():
            line = generalized(os.fsdecode(path))
            if line in wanted:
                named[line].append(path)
        return [path for line in self.lines for path in named.get(line, ())]

    def missing(self, paths: Iterable[bytes]) -> list[str]:
        """The lines that name nothing among an image's paths."""
        there = {generalized(os.fsdecode(path)) for path in paths}
        return [line for line in self.lines if line not in there]


NONE = HotList()


def walk_order(name: bytes) -> bytes:
    """The key by which paths are sorted as a walk meets them: a folder, then all that is in it."""
    return name.replace(b"/", b"\0")


def hot_first(hot: HotList, files: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The files of an image, in the order of a walk, as the hot ones in theirs and the others."""
    first = hot.found(files)
    taken = set(first)
    return first, [path for path in files if path not in taken]


def _can_be_a_line(path: str) -> bool:
    return bool(path) and "\n" not in path and not path.startswith(COMMENT)
