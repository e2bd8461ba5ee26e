"""The caller's account in a container: its entries, its home folder, its shell and its umask."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from sqshforge.host.rootpath import folder, inside, text

PASSWD, GROUP = "/etc/passwd", "/etc/group"
SKELETON = "/etc/skel"


def add(root: Path, uid: int, gid: int, home: str) -> None:
    """Add the caller, under the host's names, to passwd and group if the image lacks the ids."""
    user = group = "user"
    with contextlib.suppress(KeyError):  # the host has no name for the id
        user = pwd.getpwuid(uid).pw_name
    with contextlib.suppress(KeyError):
        group = grp.getgrgid(gid).gr_name
    _add_line(root, PASSWD, uid, f"{user}:x:{uid}:{gid}::{home}:/bin/sh")
    _add_line(root, GROUP, gid, f"{group}:x:{gid}:")


def make_home(root: Path, home: str) -> None:
    """Make a missing home folder with the content of the image's /etc/skel, as enroot does.

    Links are copied as links, and devices, pipes and sockets are left out, so that root reads
    nothing of the host through them.
    """
    place, skeleton = inside(root, home), inside(root, SKELETON)
    if place.exists() or not skeleton.is_dir() or place.is_relative_to(skeleton):
        folder(root, home)
    else:
        shutil.copytree(skeleton, place, symlinks=True, ignore=_special)


def login_shell(root: Path, uid: int) -> str:
    """The shell that the container's passwd names for a user, or /bin/sh."""
    for fields in _entries(root, PASSWD, uid):
        if len(fields) > 6 and _is_shell(root, fields[6]):
            return fields[6]
    return "/bin/sh"


def login_umask(root: Path, uid: int, inherited: int) -> int:
    """The umask from the container's login.defs(5): UMASK, and USERGROUPS_ENAB for a user.

    Enroot's login shells have the same. Without these settings it stays the caller's.
    """
    settings = dict(
        re.findall(r'^[ \t]*(\w+)[ \t="]+([^ \t"#\n]+)', text(root, "/etc/login.defs"), re.M)
    )
    umask = inherited
    number = settings.get("UMASK", "")
    if re.fullmatch("0[0-7]{0,4}|[1-9][0-9]{0,3}", number):
        umask = int(number, 8 if number.startswith("0") else 10) & 0o777
    if settings.get("USERGROUPS_ENAB", "").lower() in ("yes", "true") and _has_own_group(root, uid):
        umask = umask & ~0o070 | umask >> 3 & 0o070  # the same bits for the group as for the user
    return umask


def _has_own_group(root: Path, uid: int) -> bool:
    """Whether a user other than root has a private group, of the same number and name."""
    user = next(_entries(root, PASSWD, uid), [])
    group = next(_entries(root, GROUP, uid), [])
    return uid != 0 and user[3:4] == [str(uid)] and user[:1] == group[:1]


def _entries(root: Path, path: str, number: int) -> Iterator[list[str]]:
    """The fields of each entry that passwd or group has for an id."""
    for entry in text(root, path).split("\n"):
        fields = entry.split(":")
        if fields[2:3] == [str(number)]:
            yield fields


def _add_line(root: Path, path: str, number: int, line: str) -> None:
    """Add an entry for an id that passwd or group does not have yet.

    If the image has a device or a pipe in place of the file, it is replaced, not written to.
    """
    if not any(_entries(root, path, number)):
        entries = text(root, path).split("\n")
        content = "\n".join([*filter(None, entries), line, ""])
        place = inside(root, path)
        if os.path.lexists(place) and not place.is_file():
            place.unlink()
        place.write_bytes(content.encode(errors="surrogateescape"))


def _special(parent: str, names: list[str]) -> list[str]:
    """The entries of a folder that are neither files nor folders nor links."""
    paths = {name: Path(parent, name) for name in names}
    return [
        name
        for name, path in paths.items()
        if not (path.is_symlink() or path.is_file() or path.is_dir())
    ]


def _is_shell(root: Path, path: str) -> bool:
    """Whether a program can run commands; /usr/sbin/nologin and /bin/false cannot."""
    place = inside(root, path)
    return (
        place.is_file()
        and os.access(place, os.X_OK)
        and Path(path).name not in ("nologin", "false")
    )
