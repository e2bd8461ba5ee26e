"""What enroot changes of an image's tree, done to a tar stream as it passes.

Devices and docker's marker are left out, owners become 0:0, modes are widened so that the owner
can read everything, and the four files of enroot take the place of the image's own.
"""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Callable, Mapping
from typing import IO

from sqshforge.errors import WorkError

LEFT_OUT = ("dev/*", ".dockerenv")
PIECE = 1 << 20


def copy(
    source: IO[bytes],
    target: IO[bytes],
    files: Mapping[str, bytes],
    epoch: int,
    advance: Callable[[float], None],
) -> None:
    """Copy a tar from source to target with the changes above.

    `files` maps paths to the contents of mode-0644 files; `epoch` is their time; `advance` is
    told the bytes as they pass. Raises `WorkError` for a broken stream. GNU format: it keeps
    names as bytes, of any length, and has no room for extended attributes, which enroot drops.
    """
    folders = set()
    try:
        with (
            tarfile.open(fileobj=source, mode="r|", bufsize=PIECE) as incoming,
            tarfile.open(
                fileobj=target, mode="w|", bufsize=PIECE, format=tarfile.GNU_FORMAT
            ) as outgoing,
        ):
            for member in incoming:
                member.name = member.name.removeprefix("./").strip("/")
                if not member.name or is_left_out(member.name) or member.name in files:
                    continue
                if member.isdir():
                    folders.add(member.name)
                if member.islnk():
                    member.linkname = member.linkname.removeprefix("./").lstrip("/")
                widen(member)
                content = incoming.extractfile(member) if member.isreg() else None
                outgoing.addfile(member, _Counted(content, advance) if content else None)
                for tar in (incoming, outgoing):
                    # TarFile keeps each entry that it has seen; nobody will ask for them again.
                    tar.members.clear()  # type: ignore[attr-defined]
            for name, data in sorted(files.items()):
                parent = name.rpartition("/")[0]
                if parent not in folders:
                    folders.add(parent)
                    outgoing.addfile(_entry(parent, tarfile.DIRTYPE, 0o755, epoch))
                entry = _entry(name, tarfile.REGTYPE, 0o644, epoch)
                entry.size = len(data)
                outgoing.addfile(entry, io.BytesIO(data))
    except tarfile.TarError as error:
        raise WorkError(f"the image's tar stream is broken: {error}") from None
    shutil.copyfileobj(source, _Nowhere())


def is_left_out(name: str) -> bool:
    return name.startswith("dev/") or name == ".dockerenv"


def widen(member: tarfile.TarInfo) -> None:
    """Owner 0:0; files readable by it, folders readable, searchable and writable."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    if member.isdir():
        member.mode |= 0o700
    elif member.isreg():
        member.mode |= 0o400


def _entry(name: str, kind: bytes, mode: int, epoch: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.mtime = kind, mode, epoch
    return entry


class _Counted(io.RawIOBase):
    """A member's content that tells how much of it was read."""

    def __init__(self, content: IO[bytes], advance: Callable[[float], None]) -> None:
        self._content = content
        self._advance = advance

    def read(self, size: int = -1) -> bytes:
        piece = self._content.read(size)
        self._advance(len(piece))
        return piece


class _Nowhere(io.RawIOBase):
    """Takes what stands after a tar's end mark, so that the writer is not cut off."""

    def write(self, data: object) -> int:
        return len(data)  # type: ignore[arg-type]
