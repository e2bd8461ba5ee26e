"""Summarize one squash file in a few facts and tables."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.table import Table

from sqshforge.errors import WorkError, shown
from sqshforge.host.files import parse_object
from sqshforge.host.terminal import human
from sqshforge.image.enroot import CARRIED
from sqshforge.inspect import packages, shares
from sqshforge.inspect.packages import Package
from sqshforge.inspect.shares import Share
from sqshforge.inspect.signature import beside as signature_beside
from sqshforge.squash import request as record
from sqshforge.squashfs.content import Content
from sqshforge.squashfs.hot_note import HotRange, noted
from sqshforge.squashfs.image import Image, open_image
from sqshforge.squashfs.inode import FILE

LARGEST = 10  # number of largest files to show
MOST = 1 << 20  # most bytes of a text file to read: enroot's files, the provenance
LAUNCHER = re.compile(rf"{CARRIED}/launch/(?P<name>[^/]+)\.sbatch")
START = re.compile(r"^[ \t]*exec (?P<words>.*)$", re.MULTILINE)  # of /etc/rc, ours and enroot's own


@dataclass(frozen=True)
class Inspection:
    """Facts about a squash file. `record` is the one beside it, None without one."""

    file: Path
    size: int  # bytes
    signed: bool
    hot: HotRange | None  # the bytes that a start reads, as noted in the file
    content_end: int  # bytes from the start of the file
    compression: str
    block: int  # bytes
    made: int  # seconds of the epoch
    entries: int
    unpacked: int  # bytes of all files
    record: Mapping[str, Any] | None
    provenance: Mapping[str, Any] | None  # of the image: /sqshforge/meta/provenance.json
    environment: Mapping[str, str]
    start: tuple[str, ...]  # what /etc/rc runs, with and without arguments
    launchers: tuple[str, ...]
    folders: Mapping[bytes, Share]
    parts: Mapping[bytes, Share]
    python: tuple[Package, ...]
    debian: Mapping[str, str]
    largest: Mapping[bytes, Share]

    @property
    def stored(self) -> int:
        """Bytes in the file that are content."""
        return sum(share.stored for share in self.folders.values())

    def json(self) -> str:
        """Return everything as JSON; bytes of a path that are not UTF-8 become surrogates."""
        facts = asdict(self)
        facts["file"] = str(self.file)
        for name in ("folders", "parts", "largest"):
            facts[name] = [
                {"path": os.fsdecode(path), **asdict(share)}
                for path, share in getattr(self, name).items()
            ]
        facts["python"] = [
            {"name": one.name, "version": one.version, "folder": one.folder, **asdict(one.share)}
            for one in self.python
        ]
        return json.dumps(facts, indent=2)

    def lines(self) -> list[str]:
        """Return the facts as text."""
        made = datetime.fromtimestamp(self.made, timezone.utc)
        facts = [
            ("squash file", f"{human(self.size)}, {self.compression}, blocks of {self.block} B"),
            ("in it", f"{self.entries} entries, {human(self.unpacked)} unpacked"),
            ("made", f"{made:%Y-%m-%d %H:%M} UTC"),
            ("hot files", self._hot()),
        ]
        facts += self._origin()
        facts += [("signed", "yes, sqshforge verify says who signed" if self.signed else "no")]
        facts += [("launchers", " ".join(self.launchers) or "none")]
        for words, when in zip(self.start, ("with arguments", "without"), strict=False):
            facts.append(("runs", f"{words}  ({when})"))
        facts += [("environment", f"{name}={value}") for name, value in self.environment.items()]
        lines, last = [str(self.file)], ""
        for name, value in facts:
            lines.append(f"  {name if name != last else '':12}  {value}")
            last = name
        return lines

    def _hot(self) -> str:
        """Describe where the files are that a start reads."""
        if self.hot is None:
            return "not noted: packed without a list of them, or by one that names no file of it"
        share = 100 * self.hot.length / max(1, self.size)
        return f"{human(self.hot.length)} from byte {self.hot.offset} on, {share:.0f}% of the file"

    def _origin(self) -> list[tuple[str, str]]:
        """Describe the file's origin, from its record and the image's provenance."""
        facts = []
        if self.record is None:
            facts.append(
                ("record", f"none: there is no {record.record_path(self.file).name} of ours")
            )
        else:
            try:
                image = record.record_image(self.record)
            except WorkError as error:
                facts.append(("record", error.what))
            else:
                facts.append(("source", image.reference))
                facts.append(("image", image.digest or "it has no digest"))
                facts += [("layers", layer) for layer in image.layers]
                facts.append(("entrypoint", shlex.join(image.entrypoint) or "none"))
            facts.append(("key", str(self.record["key"])))
            facts.append(("digest", str(self.record.get("digest"))))
            settings = self.record.get("settings")
            if isinstance(settings, dict) and "tool" in settings:
                facts.append(("packed by", str(settings["tool"])))
        if self.provenance is not None:
            builder = self.provenance.get("builder", "unknown")
            platform = self.provenance.get("platform")
            built_for = f" for {platform}" if isinstance(platform, str) else ""
            facts.append(("target", f"{self.provenance.get('target')}{built_for}, by {builder}"))
            unlocked = self.provenance.get("unlocked")
            if isinstance(unlocked, list):
                facts += [("not locked", str(entry)) for entry in unlocked]
        return facts

    def tables(self) -> list[Table]:
        """Return tables of what takes the most space."""
        packages_ = _table("Python package", "version")
        for one in self.python:
            self._row(packages_, one.share, one.name, one.version)
        return [
            self._shares("folder", self.folders),
            self._shares("where most is", self.parts),
            packages_,
            self._shares("largest file", self.largest),
        ]

    def _shares(self, title: str, found: Mapping[bytes, Share]) -> Table:
        table = _table(title)
        for path, share in found.items():
            self._row(table, share, f"/{shown(path)}")
        return table

    def _row(self, table: Table, share: Share, *words: str) -> None:
        percent = 100 * share.stored / max(1, self.stored)
        table.add_row(*words, human(share.stored), f"{percent:.1f}%", human(share.unpacked))


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title)
    for title in ("in the file", "share", "unpacked"):
        table.add_column(title, justify="right")
    return table


def inspect(file: Path) -> Inspection:
    """Examine a squash file, made by us or by enroot.

    Raises `RequestError` if it does not exist or is not a squash file, `WorkError` if it is
    broken.
    """
    with open_image(file) as image:
        content = Content(image)
        found = shares.of_files(image)
        largest = sorted(found.items(), key=lambda one: (-one[1].stored, one[0]))[:LARGEST]
        return Inspection(
            file=file,
            size=file.stat().st_size,
            signed=signature_beside(file).is_file(),
            hot=noted(image.reader.file, image.superblock.used),
            content_end=image.superblock.tables,
            compression=image.compression,
            block=image.superblock.block,
            made=image.superblock.made,
            entries=len(image.entries),
            unpacked=sum(share.unpacked for share in found.values()),
            record=record.read_record(file),
            provenance=_provenance(image, content),
            environment=environment(image, content),
            start=tuple(one["words"] for one in START.finditer(text(image, content, "etc/rc"))),
            launchers=tuple(
                match["name"]
                for path in image.entries
                if (match := LAUNCHER.fullmatch(os.fsdecode(path)))
            ),
            folders=shares.top_folders(found),
            parts=shares.largest_parts(found),
            python=tuple(packages.python(image, content, found)),
            debian=packages.debian(image, content),
            largest=dict(largest),
        )


def text(image: Image, content: Content, path: str) -> str:
    """Return the text of a file in the image; empty if there is no such file."""
    entry = image.find(os.fsencode(path))
    if entry is None or entry.kind != FILE:
        return ""
    return os.fsdecode(content.read(entry, MOST))


def environment(image: Image, content: Content) -> dict[str, str]:
    """Return the variables in /etc/environment."""
    lines = text(image, content, "etc/environment").split("\n")
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {name: value for name, _, value in pairs}


def _provenance(image: Image, content: Content) -> dict[str, Any] | None:
    return parse_object(text(image, content, f"{CARRIED}/meta/provenance.json"))
