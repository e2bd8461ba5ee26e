"""The root of a container: the squash file under a writable layer that lives in memory."""

from __future__ import annotations

import os
from pathlib import Path

from sqshforge.errors import WorkError
from sqshforge.host.programs import Programs
from sqshforge.host.rootpath import unescape
from sqshforge.run.supervisor import Keeper

PROGRAMS = Programs()


def mount_root(image: Path, keeper: Keeper, *, as_root: bool, fuse: bool | None) -> Path:
    """Mount all of it below the keeper's place; the merged root."""
    place = keeper.place
    mount("-t", "tmpfs", "-o", "mode=0755", "sqshforge", place)
    lower, upper, work, root = (place / name for name in ("lower", "upper", "work", "root"))
    for one in (lower, upper, work, root):
        one.mkdir()
    if not as_root:
        keeper.serve([_squashfuse(), "-f", image, lower], lower)
    elif fuse or not _mounted_by_kernel(image, lower, required=fuse is False):
        keeper.serve([_squashfuse(), "-f", "-o", "allow_other", image, lower], lower)
    upper.chmod(lower.stat().st_mode & 0o7777)  # the merged root has the mode of its upper layer
    layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
    if as_root:
        mount("-t", "overlay", "-o", layers, "overlay", root)
    elif _overlay_is_enough(image, lower, upper):
        mount("-t", "overlay", "-o", f"{layers},userxattr", "overlay", root)
    else:
        overlay = PROGRAMS.require("fuse-overlayfs", "it makes a root writable for a user")
        keeper.serve([overlay, "-f", "-o", f"{layers},squash_to_root", root], root)
    return root


def mount(*words: str | Path) -> None:
    PROGRAMS.capture(["mount", *words])


def make_read_only(place: Path) -> None:
    """Turn a bind mount read-only with all that is mounted below it.

    Its other options are named again: a user namespace must not drop what the host has set.
    """
    for line in Path("/proc/self/mountinfo").read_text().split("\n")[:-1]:
        fields = line.split(" ")
        point = Path(unescape(fields[4]))
        if point.is_relative_to(place):
            kept = [option for option in fields[5].split(",") if option != "rw"]
            mount("-o", ",".join(["remount", "bind", "ro", *kept]), point)


def _mounted_by_kernel(image: Path, lower: Path, *, required: bool) -> bool:
    try:
        mount("-t", "squashfs", "-o", "loop,ro,nodev", image, lower)
    except WorkError:
        if required:
            raise
        return False  # no loop devices here, or a kernel without squashfs or its zstd
    return True


def _overlay_is_enough(image: Path, lower: Path, upper: Path) -> bool:
    """Whether the kernel's overlay does for a user; it reads twice as fast as fuse-overlayfs.

    A folder that is removed and made anew takes user attributes on the layer in memory, which
    Linux has from 6.6 on. And all files must be the user's: other owners cannot be changed here.
    """
    try:
        os.setxattr(upper, "user.sqshforge", b"")
        os.removexattr(upper, "user.sqshforge")
    except OSError:
        return False
    with image.open("rb") as file:
        owners = int.from_bytes(file.read(28)[26:], "little")  # the superblock's no_ids
    return owners == 1 and lower.stat().st_uid == 0


def _squashfuse() -> Path:
    return PROGRAMS.which("squashfuse_ll") or PROGRAMS.require("squashfuse")
