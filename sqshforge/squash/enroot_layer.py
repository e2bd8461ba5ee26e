"""The files that enroot adds to an image, as a layer above the image's root file system."""

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

UNKEPT = (OVERLAY, b"security.selinux")  # SELinux labels are this machine's, maybe unchangeable


def fill(top: Path, image: Path, files: Mapping[str, bytes], epoch: int, *, xattrs: bool) -> None:
    """Fill the layer `top` for an image: `files` with mode 0644, and entries that a start needs.

    If /etc is a symlink, its files go to the folder that it leads to inside the image; if it leads
    to no folder that is packed, a folder replaces it. /etc and /dev get the time `epoch`, because
    their entries change. With `xattrs`, folders keep their extended attributes.
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
    """The folder that /etc is, relative to the root; `etc` if it is not a folder yet."""
    with contextlib.suppress(OSError):
        found = inside(image, "etc")
        home = found.relative_to(image)
        if found.is_dir() and home != Path() and not is_left_out(os.fsencode(home)):
            return home
    return Path("etc")


def _folder(top: Path, image: Path, path: Path, *, xattrs: bool) -> None:
    """Make a folder and its parents, each with its mode and time in the image."""
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
    """Copy an extended attribute of a folder from the image."""
    try:
        os.setxattr(place, name, os.getxattr(own, name))
    except OSError as error:  # tmpfs supports user.* attributes since Linux 6.6
        raise WorkError(
            f"the extended attribute {name} cannot be kept: {error.strerror}",
            where=f"/{path} in the image",
            fix="pack without --xattrs, or on a machine with Linux 6.6 or later",
        ) from None


def _file(place: Path, data: bytes, mode: int, epoch: int) -> None:
    place.write_bytes(data)
    place.chmod(mode)
    os.utime(place, (epoch, epoch))
