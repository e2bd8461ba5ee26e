"""/sqshforge of an image, where it can be appended to all the rest: small, and without devices.

Mksquashfs appends folders only, and no tar: that of an image that is not mounted is unpacked for a
moment. What can be appended is the same for both, so that the bytes are.
"""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path, PurePosixPath
from stat import S_ISBLK, S_ISCHR, S_ISREG

from sqshforge.errors import WorkError
from sqshforge.image.address import Remote, Stream
from sqshforge.image.enroot import CARRIED

MOST = 32 << 20  # bytes; a larger one is written with all the rest, and nothing is unpacked
ENTRY = 1 << 10  # bytes that an entry counts beside its content: a tar's header and padding
HELD = 2 * MOST  # bytes of the tar, in which long names have headers of their own


def mounted(image: Path) -> Path | None:
    """/sqshforge of a mounted image; None where it cannot be split off, as by `unpack`."""
    place = image / CARRIED
    if not place.is_dir() or place.is_symlink():
        return None
    size, seen = ENTRY, set()
    for path in place.rglob("*"):
        found = path.lstat()
        size += ENTRY
        if S_ISCHR(found.st_mode) or S_ISBLK(found.st_mode):
            return None
        if S_ISREG(found.st_mode) and (found.st_dev, found.st_ino) not in seen:
            seen.add((found.st_dev, found.st_ino))
            size += found.st_size
        if size > MOST:
            return None
    return place


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
            or sum(ENTRY + one.size for one in members) > MOST
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
        if self.tell() + len(data) > HELD:  # type: ignore[arg-type]
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
