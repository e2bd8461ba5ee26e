"""/sqshforge of an image that is not mounted: small, and unpacked for a moment.

Mksquashfs appends folders only, and no tar.
"""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path, PurePosixPath

from sqshforge.errors import WorkError
from sqshforge.image.address import Remote, Stream
from sqshforge.image.enroot import CARRIED

MOST = 32 << 20  # bytes; a larger one is written with all the rest, and nothing is unpacked


def unpack(content: Stream | Remote, work: Path) -> Path | None:
    """Unpack /sqshforge into a folder below `work`; None where it cannot be split off.

    That is where the image has none, or it is no folder, too large, or holds devices.
    """
    held = _Held()
    try:
        content.write_payload(held)
    except _TooLargeError:
        return None
    held.seek(0)
    if not held.getbuffer().nbytes:
        return None
    with tarfile.open(fileobj=held, mode="r:") as tar:
        members = tar.getmembers()
        if (
            not members
            or not members[0].isdir()
            or any(one.isdev() and not one.isfifo() for one in members)
        ):
            return None
        for member in members:
            _unpack(tar, member, work)
        # Last, as what is made in a folder changes its time, and its mode may forbid it.
        for member in reversed([one for one in members if one.isdir()]):
            place = _place(member.name, work)
            os.utime(place, (member.mtime, member.mtime))
            place.chmod(member.mode | 0o700)
    return work / CARRIED


class _TooLargeError(Exception):
    pass


class _Held(io.BytesIO):
    def write(self, data: object) -> int:
        if self.tell() + len(data) > MOST:  # type: ignore[arg-type]
            raise _TooLargeError
        return super().write(data)  # type: ignore[arg-type]


def _unpack(tar: tarfile.TarFile, member: tarfile.TarInfo, work: Path) -> None:
    place = _place(member.name, work)
    if member.isdir():
        place.mkdir(mode=0o700)
        return
    if member.issym():
        place.symlink_to(member.linkname)
    elif member.islnk():
        os.link(_place(member.linkname, work), place, follow_symlinks=False)
        return
    elif member.isfifo():
        os.mkfifo(place)
    elif (data := tar.extractfile(member)) is not None:
        with place.open("xb") as file:
            file.write(data.read())
    if not member.issym():
        place.chmod(member.mode | 0o400)
    os.utime(place, (member.mtime, member.mtime), follow_symlinks=False)


def _place(name: str, work: Path) -> Path:
    """Where an entry goes; `WorkError` for a name that is not of the folder or leads out of it."""
    path = PurePosixPath(name)
    if not path.parts or path.parts[0] != CARRIED or ".." in path.parts:
        raise WorkError(f"the engine gave {name!r} as a part of /{CARRIED}")
    parent = work.joinpath(*path.parts[:-1])
    if parent.is_symlink():
        raise WorkError(f"{name!r} lies behind a link in the image")
    return work.joinpath(*path.parts)
