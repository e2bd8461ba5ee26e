"""What enroot adds to an image, as a layer of its own above the image's root file system."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from sqshforge.errors import WorkError
from sqshforge.host.rootpath import inside
from sqshforge.image import enroot
from sqshforge.image.enroot import is_left_out
from sqshforge.tar.writer import NAMESPACES, OVERLAY

UNKEPT = (OVERLAY, b"security.selinux")  # a file's label is this machine's, and may be fixed


def fill(top: Path, image: Path, files: Mapping[str, bytes], epoch: int, *, xattrs: bool) -> None:
    """Fill the layer for an image: `files` of mode 0644, and what is missing to start it.

    Where /etc is a link, what belongs there goes to the folder it leads to inside the image;
    where it leads to none that is packed, a folder takes its place. /etc and /dev get the time
    `epoch`, as things are put in and taken out there. With `xattrs`, folders keep their extended
    attributes.
    """
    home = etc(image)
    for name in ("dev", "proc", "sys"):
        _folder(top, image, Path(name), xattrs=xattrs)
    _folder(top, image, home, xattrs=xattrs)
    for name, data in files.items():
        _file(top / home / Path(name).name, data, 0o644, epoch)
    for name in enroot.EMPTY:
        if not os.path.lexists(image / home / name):
            _file(top / home / name, b"", 0o755, epoch)
    if not os.path.lexists(image / home / "mtab"):
        (top / home / "mtab").symlink_to(enroot.MTAB)
        os.utime(top / home / "mtab", (epoch, epoch), follow_symlinks=False)
    for changed in (Path("dev"), home, Path()):
        os.utime(top / changed, (epoch, epoch))


def etc(image: Path) -> Path:
    """The folder of /etc, relative to the root; `etc` where it is none yet."""
    with contextlib.suppress(OSError):
        found = inside(image, "etc")
        home = found.relative_to(image)
        if found.is_dir() and home != Path() and not is_left_out(os.fsencode(home)):
            return home
    return Path("etc")


def _folder(top: Path, image: Path, path: Path, *, xattrs: bool) -> None:
    """A folder and those above it, each with the mode and time it has in the image."""
    if path.parent != Path():
        _folder(top, image, path.parent, xattrs=xattrs)
    place, own = top / path, image / path
    if place.is_dir():
        return
    place.mkdir()
    place.chmod(0o755)
    if own.is_dir() and not own.is_symlink():
        found = own.stat()
        place.chmod(found.st_mode & 0o7777)
        for name in os.listxattr(own) if xattrs else ():
            key = os.fsencode(name)
            if key.startswith(NAMESPACES) and not key.startswith(UNKEPT):
                _keep(name, own, place, path)
        os.utime(place, ns=(found.st_mtime_ns, found.st_mtime_ns))


def _keep(name: str, own: Path, place: Path, path: Path) -> None:
    """Give a folder an extended attribute that it has in the image."""
    try:
        os.setxattr(place, name, os.getxattr(own, name))
    except OSError as error:  # tmpfs has those of users since Linux 6.6
        raise WorkError(
            f"the extended attribute {name} cannot be kept: {error.strerror}",
            where=f"/{path} in the image",
            fix="pack without --xattrs, or on a machine with Linux 6.6 or later",
        ) from None


def _file(place: Path, data: bytes, mode: int, epoch: int) -> None:
    place.write_bytes(data)
    place.chmod(mode)
    os.utime(place, (epoch, epoch))
