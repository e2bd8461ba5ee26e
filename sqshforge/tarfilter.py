"""What enroot changes of an image's tree, done to a tar stream as it passes.

Devices and docker's marker are left out, owners become 0:0, modes are widened so that the owner
can read everything, and the four files of enroot take the place of the image's own.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from typing import IO, cast

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
    dropped = _Dropped()
    try:
        with (
            dropped,
            tarfile.open(fileobj=source, mode="r|", bufsize=PIECE, tarinfo=_Strict) as incoming,
            tarfile.open(
                fileobj=target, mode="w|", bufsize=PIECE, format=tarfile.GNU_FORMAT
            ) as outgoing,
        ):
            for member in incoming:
                member.name = _plain(member.name)
                member.linkname = _plain(member.linkname) if member.islnk() else member.linkname
                content = incoming.extractfile(member) if member.isreg() else None
                if is_left_out(member.name) or member.name in files:
                    dropped.add(member, content)
                elif member.name:
                    member, content = dropped.stand_in(member, content)
                    if member.isdir():
                        folders.add(member.name)
                    widen(member)
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
    """Owner 0:0; files readable by it and without holes, folders readable and writable."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    if member.isdir():
        member.mode |= 0o700
    elif member.isreg():
        member.mode |= 0o400
        member.type = tarfile.REGTYPE


def _entry(name: str, kind: bytes, mode: int, epoch: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.mtime = kind, mode, epoch
    return entry


def _plain(name: str) -> str:
    return name.removeprefix("./").strip("/")


class _Strict(tarfile.TarInfo):
    """A header; only the end mark ends a stream, and not any fault as `tarfile` has it."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _Strict:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


class _Dropped(contextlib.ExitStack):
    """Files whose first name is left out: their content lives on under their other hard links."""

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[str, tuple[tarfile.TarInfo, IO[bytes]]] = {}
        self._now: dict[str, str] = {}  # a name that was left out to one of the same file

    def add(self, member: tarfile.TarInfo, content: IO[bytes] | None) -> None:
        """Keep a member that is left out, in memory or on the disk by its size."""
        if content:
            copy = tempfile.SpooledTemporaryFile(max_size=PIECE)  # noqa: SIM115
            self.callback(copy.close)
            shutil.copyfileobj(content, copy)
            copy.seek(0)
            self._files[member.name] = (member, cast(IO[bytes], copy))
        elif member.islnk():
            self._now[member.name] = member.linkname

    def stand_in(
        self, member: tarfile.TarInfo, content: IO[bytes] | None
    ) -> tuple[tarfile.TarInfo, IO[bytes] | None]:
        """The member itself, or the file that was left out and that it is the next link to."""
        if not member.islnk():
            return member, content
        while member.linkname in self._now:
            member.linkname = self._now[member.linkname]
        if member.linkname not in self._files:
            return member, content
        self._now[member.linkname] = member.name
        file, content = self._files.pop(member.linkname)
        file.name = member.name
        return file, content


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
