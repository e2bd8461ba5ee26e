"""The /sqshforge of an image, if it can be appended to the base: it is small and has no devices.

Mksquashfs appends folders but not a tar, so the /sqshforge of an image that is not mounted is
unpacked for a moment. The conditions are the same for both ways, so the bytes are the same too.
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

MOST = 32 << 20  # bytes; a larger one is packed with the rest of the image, and not unpacked
ENTRY = 1 << 10  # bytes counted for an entry besides its content: a tar's header and padding
HELD = 2 * MOST  # bytes of the tar, in which long names take headers of their own


def mounted(image: Path) -> Path | None:
    """The /sqshforge of a mounted image; None if it cannot be split off, as in `unpack`."""
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
    """Unpack /sqshforge into a folder below `work`; return None if it cannot be split off.

    That is so if the image has none, or if it is not a folder, is too large, or holds devices.
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
        # Last, because new entries change a folder's time, and its mode may forbid them.
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
    """The path to unpack an entry to; `WorkError` for a name outside of /sqshforge."""
    path = PurePosixPath(name)
    if not path.parts or path.parts[0] != CARRIED or ".." in path.parts:
        raise WorkError(f"the engine gave {name!r} as a part of /{CARRIED}")
    parent = work.joinpath(*path.parts[:-1])
    if parent.is_symlink():
        raise WorkError(f"{name!r} lies behind a link in the image")
    return work.joinpath(*path.parts)
