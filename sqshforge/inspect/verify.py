"""Verify a squash file: its structure, its record, its signature."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from sqshforge.errors import RequestError, WorkError
from sqshforge.host.files import digest
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.image import enroot
from sqshforge.inspect import signature
from sqshforge.squash import request
from sqshforge.squashfs import content
from sqshforge.squashfs.content import Content
from sqshforge.squashfs.faults import BrokenError
from sqshforge.squashfs.image import Image, open_image

ABSENT = "absent"


@dataclass(frozen=True)
class Check:
    """The result of one check: ok, FAILED, or absent, which is not a fault."""

    name: str
    result: str
    detail: str


@dataclass(frozen=True)
class Verdict:
    """The results of all checks of a file."""

    digest: str  # the file's current digest
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.result != "FAILED" for check in self.checks)

    def table(self) -> Table:
        table = Table("check", "result", "detail", box=None, pad_edge=False)
        for check in self.checks:
            table.add_row(check.name, check.result, check.detail)
        return table


def verify(
    file: Path, signers: Path | None, jobs: int, programs: Programs, reporter: Reporter
) -> Verdict:
    """Check a squash file, and the record and signature beside it.

    With `signers` (an allowed signers file of ssh-keygen) the file must be signed by one of them.
    Raises `RequestError` if a file does not exist or is not a squash file, `WorkError` if it is of
    another version or cannot be read.
    """
    if signers is not None and not signers.is_file():
        raise RequestError(
            "the file of allowed signers does not exist",
            where=str(signers),
            fix="write one: lines of NAME KEYTYPE KEY, as ssh-keygen(1) tells",
        )
    facts = request.read_record(file)
    size = file.stat().st_size if file.is_file() else 0
    with reporter.track("verifying", 2 * size or None) as bar:
        structure, files = _structure(file, jobs, bar.advance)
        bar.set(size)  # tables were not counted, nor anything after a fault
        found = digest(file, jobs, bar.advance)
    checks = [structure]
    if facts is None:
        checks.append(
            Check("record", ABSENT, f"there is no {request.record_path(file).name} of ours")
        )
    else:
        checks += _record(file, facts, found, files)
    checks.append(_signature(file, found, facts, signers, programs))
    return Verdict(found, tuple(checks))


def _structure(
    file: Path, jobs: int, advance: Callable[[float], None]
) -> tuple[Check, dict[str, bytes]]:
    """Check every table and block, and read enroot's four files, for the check of the record."""
    files: dict[str, bytes] = {}
    try:
        with open_image(file) as image:
            for entry in image.entries.values():
                image.xattrs(entry)
            content.check(image, jobs, advance)
            files = dict(_files(image))
            detail = f"{len(image.entries)} entries, every block can be unpacked"
    except BrokenError as error:
        return Check("structure", "FAILED", error.what), files
    return Check("structure", "ok", detail), files


def _files(image: Image) -> Iterator[tuple[str, bytes]]:
    reading = Content(image)
    for path in enroot.files(enroot.ImageConfig(reference="")):
        entry = image.find(path.encode())
        if entry is not None and entry.kind == "file":
            yield path, reading.read(entry, 1 << 20)


def _record(
    file: Path, facts: dict[str, Any], found: str, files: dict[str, bytes]
) -> Iterator[Check]:
    """Check that the record belongs to this file, and that its content key is right."""
    size = file.stat().st_size
    if size != facts["size"]:
        yield Check("record", "FAILED", f"the file has {size} bytes, not {facts['size']}")
    elif found != facts.get("digest"):
        yield Check("record", "FAILED", f"the file's digest is {found}, not {facts.get('digest')}")
    else:
        yield Check("record", "ok", found)
    yield _content_key(facts, files)


def _content_key(facts: dict[str, Any], files: dict[str, bytes]) -> Check:
    name = "content key"
    try:
        packed_as = request.record_format(facts)
        if packed_as != request.FORMAT:
            # What that version put into a key, and into enroot's files, is not known here.
            what = f"made by another version (format {packed_as}, not {request.FORMAT})"
            return Check(name, ABSENT, f"{what}: it is not compared")
        image, key = request.record_image(facts), request.record_key(facts)
    except WorkError as error:
        return Check(name, "FAILED", error.what)
    if key != facts["key"]:
        return Check(name, "FAILED", "it is not that of the image in the record")
    others = [path for path, data in enroot.files(image).items() if files.get(path) != data]
    if others:
        return Check(name, "FAILED", f"/{others[0]} is not that of the image")
    return Check(name, "ok", key)


def _signature(
    file: Path, found: str, facts: dict[str, Any] | None, signers: Path | None, programs: Programs
) -> Check:
    try:
        signed = signature.read(file)
        if signed is None:
            result = ABSENT if signers is None else "FAILED"
            return Check("signature", result, f"there is no {signature.beside(file).name}")
        who = signature.signer(signed, signers, programs)
    except WorkError as error:
        return Check("signature", "FAILED", error.what)
    if signed.statement.digest != found:
        return Check("signature", "FAILED", f"{who} signed another file: sign this one anew")
    if facts is not None and signed.statement.key != facts["key"]:
        return Check("signature", "FAILED", f"{who} signed it with another content key")
    if signers is None:
        who += ", whoever that is: --signers FILE tells whose keys are good"
    return Check("signature", "ok", who)
