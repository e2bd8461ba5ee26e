"""What happens between the new mount namespace and the image's /etc/rc.

Runs as a small program of its own in that namespace and ends by becoming the command. All mounts
are in the namespace, so they are gone with the last process in it, however that ends.
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sqshforge.errors import MissingError, SqshforgeError, WorkError
from sqshforge.host import syscalls
from sqshforge.host.rootpath import folder, inside, text, unescape
from sqshforge.run import supervisor
from sqshforge.run.environment import merge
from sqshforge.run.layers import make_read_only, mount, mount_root

FROM_HOST = ("hosts", "hostname", "resolv.conf", "machine-id")


@dataclass(frozen=True)
class Plan:
    """What to start, as the outer process decided it."""

    image: str
    command: tuple[str, ...]
    mounts: tuple[tuple[str, str, bool], ...]  # (source, target, read-only)
    environment: Mapping[str, str]  # what was asked for; the host's is this process's own
    uid: int
    gid: int
    fuse: bool | None


def main(words: str) -> NoReturn:
    """Set the container up and become its command; a few lines and an exit code if that fails."""
    plan = Plan(**json.loads(words))
    try:
        _become_command(plan)
    except (OSError, SqshforgeError) as error:
        told = error if isinstance(error, MissingError) else _failure(error, plan)
        print("\n".join(told.lines()), file=sys.stderr)
        sys.exit(told.exit_code)


def _failure(error: OSError | SqshforgeError, plan: Plan) -> WorkError:
    reason = error.what if isinstance(error, SqshforgeError) else str(error)
    return WorkError(f"the container cannot be set up: {reason}", where=plan.image)


def _become_command(plan: Plan) -> NoReturn:
    umask = os.umask(0o022)  # what is made here is for all users of the container
    beside = supervisor.start()
    root = mount_root(Path(plan.image), beside, as_root=plan.uid == 0, fuse=plan.fuse)
    # Up to here and in all programs that are called for the set-up, the host's environment holds:
    # the image's PATH or LD_LIBRARY_PATH is not for them.
    environment = merge(os.environ, text(root, "/etc/environment"), plan.environment)
    home = environment.get("HOME", "")
    home = home if home.startswith("/") else "/"
    _own_files(root, plan, home)
    _volumes(root)
    for source, target, read_only in plan.mounts:
        _bind(Path(source), root, target, read_only)
    syscalls.pivot(root)
    beside.set_up()
    if plan.uid != 0:
        syscalls.become(plan.uid, plan.gid)
    argv = start_words(plan, home)
    os.umask(umask)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and that is inherited
    os.execve(argv[0], [f"-{Path(argv[0]).name}", *argv[1:]], environment)


def _own_files(root: Path, plan: Plan, home: str) -> None:
    """What every container takes from its host: its names, its devices, its user."""
    etc = folder(root, "/etc")
    for name in FROM_HOST:
        source, target = Path("/etc") / name, etc / name
        if source.exists():
            # Replaced, not written through: in an image it is often a link to nowhere.
            target.unlink(missing_ok=True)
            shutil.copyfile(source, target)
    user, group = _names(plan.uid, plan.gid)
    _add_line(root, "/etc/passwd", plan.uid, f"{user}:x:{plan.uid}:{plan.gid}::{home}:/bin/sh")
    _add_line(root, "/etc/group", plan.gid, f"{group}:x:{plan.gid}:")
    for path in ("/proc", "/sys", "/dev"):
        mount("--rbind", path, folder(root, path))
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", folder(root, "/tmp"))
    folder(root, home)


def _names(uid: int, gid: int) -> tuple[str, str]:
    """What the host calls the caller and its group."""
    user = group = "user"
    with contextlib.suppress(KeyError):  # an id that the host has no name for
        user = pwd.getpwuid(uid).pw_name
    with contextlib.suppress(KeyError):
        group = grp.getgrgid(gid).gr_name
    return user, group


def _add_line(root: Path, path: str, number: int, line: str) -> None:
    """Add an entry for an id that passwd or group does not have yet."""
    entries = text(root, path).rstrip("\n").split("\n")
    if not any(entry.split(":")[2:3] == [str(number)] for entry in entries):
        content = "\n".join([*filter(None, entries), line, ""])
        inside(root, path).write_text(content, errors="surrogateescape")


def _volumes(root: Path) -> None:
    """Honour /etc/fstab as enroot writes it: binds of the root's own folders."""
    for line in text(root, "/etc/fstab").split("\n"):
        fields = [unescape(field) for field in line.split()]
        if len(fields) < 4 or fields[0].startswith("#") or "bind" not in fields[3].split(","):
            continue
        target = folder(root, fields[1])
        own = fields[0].removeprefix("${ENROOT_ROOTFS}")
        mount("--bind", fields[0] if own == fields[0] else folder(root, own), target)
        kept = [word for word in fields[3].split(",") if word in ("nosuid", "nodev", "ro")]
        mount("-o", ",".join(["remount", "bind", *kept]), target)


def _bind(source: Path, root: Path, target: str, read_only: bool) -> None:
    if source.is_dir():
        place = folder(root, target)
    else:
        place = inside(root, target)
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            place.touch()
    mount("--rbind", source, place)
    if read_only:
        make_read_only(place)


def start_words(plan: Plan, home: str) -> list[str]:
    """The login shell of the container's user with /etc/rc and the command.

    An image without /etc/rc starts in the home folder, with the command alone or a shell.
    """
    shell = _login_shell(plan.uid)
    if Path("/etc/rc").is_file():
        return [shell, "/etc/rc", *plan.command]
    os.chdir(home)
    return [shell, "-c", 'exec "$@"', shell, *plan.command] if plan.command else [shell]


def _login_shell(uid: int) -> str:
    for entry in text(Path("/"), "/etc/passwd").split("\n"):
        fields = entry.split(":")
        if len(fields) > 6 and fields[2] == str(uid) and _is_shell(fields[6]):
            return fields[6]
    return "/bin/sh"


def _is_shell(path: str) -> bool:
    """Whether commands can be run by it; /usr/sbin/nologin and /bin/false are no shells."""
    return os.access(path, os.X_OK) and Path(path).name not in ("nologin", "false")
