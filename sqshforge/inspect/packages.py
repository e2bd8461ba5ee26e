"""The packages in a squash file, according to Python's and Debian's own records.

Python: the core metadata specifications, "Recording installed projects" (dist-info, RECORD), and
the egg-info of setuptools. Debian: the Policy Manual, chapter 5 (control files), of
/var/lib/dpkg/status, or of /var/lib/dpkg/status.d in images without dpkg.
"""

from __future__ import annotations

import contextlib
import csv
import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from sqshforge.inspect.shares import Share
from sqshforge.squashfs.content import Content
from sqshforge.squashfs.image import Image
from sqshforge.squashfs.inode import FILE, FOLDER, Entry

RECORD = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-py[\d.]+)?\.(dist|egg)-info")
MODULE = re.compile(r"(?P<name>\w+)(\.[\w.-]+)?\.(py|so)")
MOST = 64 << 20  # most bytes of a record to read


@dataclass(frozen=True)
class Package:
    """A Python package. Two folders of an image may contain the same one."""

    name: str
    version: str
    folder: str  # the folder on Python's path
    share: Share


def python(image: Image, content: Content, shares: Mapping[bytes, Share]) -> list[Package]:
    """Return the Python packages, largest first."""
    below = _Below(image)
    claimed: set[bytes] = set()
    found = []
    for path, entry in image.entries.items():
        folder, _, last = path.rpartition(b"/")
        match = RECORD.fullmatch(os.fsdecode(last))
        if match is None or (entry.kind == FOLDER and not _is_installed(image, path)):
            continue
        share = Share()
        for file in _files(image, content, below, path, match["name"]):
            if file in shares and file not in claimed:
                claimed.add(file)
                share += shares[file]
        found.append(Package(match["name"], match["version"], os.fsdecode(folder), share))
    return sorted(found, key=lambda one: (-one.share.stored, one.name, one.folder))


def debian(image: Image, content: Content) -> dict[str, str]:
    """Map installed Debian packages (with their architecture if it is ambiguous) to versions."""
    stanzas: list[dict[str, str]] = []
    status = image.find(b"var/lib/dpkg/status")
    if status is not None and status.kind == FILE:
        stanzas += _stanzas(_text(content, status))
    lists = image.find(b"var/lib/dpkg/status.d")
    if lists is not None:
        for entry in image.entries.values():
            if entry.kind == FILE and entry.path.rpartition(b"/")[0] == lists.path:
                stanzas += _stanzas(_text(content, entry))
    names: dict[str, list[dict[str, str]]] = defaultdict(list)
    for stanza in stanzas:
        # Not "hold ok not-installed" or "install reinstreq half-installed".
        is_installed = stanza.get("Status", "installed").split()[-1:] == ["installed"]
        if is_installed and "Package" in stanza:
            names[stanza["Package"]].append(stanza)
    found = {}
    for name, ones in sorted(names.items()):
        for one in ones:
            full = f"{name}:{one.get('Architecture', '')}" if len(ones) > 1 else name
            found[full] = one.get("Version", "")
    return found


class _Below:
    """The contents of each folder of an image."""

    def __init__(self, image: Image) -> None:
        self._children: dict[bytes, list[bytes]] = defaultdict(list)
        for path in image.entries:
            if path:
                self._children[path.rpartition(b"/")[0]].append(path)

    def children(self, folder: bytes) -> list[bytes]:
        return self._children.get(folder, [])

    def all(self, path: bytes) -> Iterator[bytes]:
        """Yield a path and everything below it."""
        todo = [path]
        while todo:
            yield (one := todo.pop())
            todo += self.children(one)


def _is_installed(image: Image, info: bytes) -> bool:
    """Whether an info folder is a real record: the tests of some packages have empty ones."""
    return any(info + b"/" + name in image.entries for name in (b"METADATA", b"PKG-INFO"))


def _files(
    image: Image, content: Content, below: _Below, info: bytes, name: str
) -> Iterator[bytes]:
    """Yield a package's paths: from its RECORD, else its top-level modules and its info folder."""
    folder = info.rpartition(b"/")[0]
    record = image.entries.get(info + b"/RECORD")
    if record is not None and record.kind == FILE:
        listed = list(_listed(folder, _text(content, record)))
        yield from listed
        yield from _compiled(below, listed)
    else:
        tops = image.entries.get(info + b"/top_level.txt")
        modules = {re.sub(r"[-.]+", "_", name).lower()}
        if tops is not None and tops.kind == FILE:
            modules = set(_text(content, tops).split())
        for path in below.children(folder):
            last = os.fsdecode(path.rpartition(b"/")[2])
            module = MODULE.fullmatch(last)
            if last in modules or (module is not None and module["name"] in modules):
                yield from below.all(path)
    yield from below.all(info)


def _listed(folder: bytes, record: str) -> Iterator[bytes]:
    """Yield the paths in a RECORD, where they are relative to the package's folder or absolute."""
    with contextlib.suppress(csv.Error):  # the rest is not a list of files
        for row in csv.reader(record.splitlines()):
            if row:
                path = posixpath.normpath(posixpath.join(b"/", folder, os.fsencode(row[0])))
                yield path.lstrip(b"/")


def _compiled(below: _Below, listed: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the modules' .pyc files: a RECORD lists them only if the installer compiled them."""
    modules: dict[bytes, set[bytes]] = defaultdict(set)
    for path in listed:
        folder, _, last = path.rpartition(b"/")
        if last.endswith(b".py"):
            modules[folder].add(last[:-3])
    for folder, names in modules.items():
        for path in below.children(folder + b"/__pycache__"):
            if path.rpartition(b"/")[2].partition(b".")[0] in names:
                yield path


def _text(content: Content, entry: Entry) -> str:
    return os.fsdecode(content.read(entry, MOST))


def _stanzas(text: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each paragraph; for a multi-line field, only its first line."""
    for paragraph in re.split(r"\n\s*\n", text):
        pairs = (line.partition(":") for line in paragraph.splitlines() if line[:1].strip())
        yield {name: value.strip() for name, _, value in pairs}
