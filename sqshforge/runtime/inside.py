"""What happens between the new mount namespace and the image's /etc/rc.

Runs as a small program of its own in that namespace and ends by becoming the command. All mounts
are in the namespace, so they are gone with the last process in it, however that ends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sqshforge.errors import SqshforgeError, WorkError
from sqshforge.programs import Programs, failed
from sqshforge.runtime import syscalls

PROGRAMS = Programs()

PATIENCE = 10.0  # seconds for squashfuse to come up
FROM_HOST = ("hosts", "hostname", "resolv.conf", "machine-id")


@dataclass(frozen=True)
class Plan:
    """What to start, as the outer process decided it."""

    image: str
    command: tuple[str, ...]
    mounts: tuple[tuple[str, str, bool], ...]  # (source, target, read-only)
    place: str
    uid: int
    gid: int
    fuse: bool | None
    home: str


def main(text: str) -> NoReturn:
    """Set the container up and become its command; exit code 1 with one line where that fails."""
    # If the outer process is killed, nobody is left to tell the command to end.
    syscalls.die_with_parent(signal.SIGKILL)
    plan = Plan(**json.loads(text))
    try:
        root = _root(plan)
        _own_files(root, plan)
        _volumes(root)
        for source, target, read_only in plan.mounts:
            _bind(Path(source), root, target, read_only)
        syscalls.pivot(root)
        if plan.uid != 0:
            syscalls.become(plan.uid, plan.gid)
        argv = start_words(plan)
    except (OSError, SqshforgeError) as error:
        reason = error.what if isinstance(error, SqshforgeError) else str(error)
        told = WorkError(f"the container cannot be set up: {reason}", where=plan.image)
        print("\n".join(told.lines()), file=sys.stderr)
        sys.exit(told.exit_code)
    sys.stdout.flush()
    os.execv(argv[0], [f"-{Path(argv[0]).name}", *argv[1:]])


def _root(plan: Plan) -> Path:
    """Mount the image under a writable layer that lives in memory; the merged root."""
    place = Path(plan.place)
    _mount("-t", "tmpfs", "-o", "mode=0755", "sqshforge", place)
    lower, upper, work, root = (place / name for name in ("lower", "upper", "work", "root"))
    for folder in (lower, upper, work, root):
        folder.mkdir()
    layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
    if plan.uid != 0:
        _serve(_squashfuse(), lower, "-f", plan.image, lower)
        # The kernel's overlay would leave the image's files to their owner, root, whom this
        # namespace does not have; here all of them are the user's, as under enroot.
        overlay = PROGRAMS.require("fuse-overlayfs", "it makes a root writable for a user")
        _serve(overlay, root, "-f", "-o", f"{layers},squash_to_root", root)
        return root
    if plan.fuse or not _mounted_by_kernel(plan, lower):
        _serve(_squashfuse(), lower, "-f", "-o", "allow_other", plan.image, lower)
    _mount("-t", "overlay", "-o", layers, "overlay", root)
    return root


def _mounted_by_kernel(plan: Plan, lower: Path) -> bool:
    try:
        _mount("-t", "squashfs", "-o", "loop,ro,nodev", plan.image, lower)
    except WorkError:
        if plan.fuse is False:
            raise
        return False  # no loop devices here, or a kernel without squashfs or its zstd
    return True


def _squashfuse() -> Path:
    return PROGRAMS.which("squashfuse_ll") or PROGRAMS.require("squashfuse")


def _serve(program: Path, mountpoint: Path, *words: str | Path) -> None:
    """Start a FUSE server; it ends with the command, whose process this one becomes."""
    server = subprocess.Popen(
        [program, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # In a session of its own: a signal to the job's process group must not pull the file
        # system from under a command that is just saving its work.
        start_new_session=True,
        preexec_fn=lambda: syscalls.die_with_parent(signal.SIGKILL),
    )
    deadline = time.monotonic() + PATIENCE
    while not os.path.ismount(mountpoint):
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            said = server.communicate()[1].decode(errors="replace").splitlines()
            raise failed([str(program)], server.returncode, said)
        time.sleep(0.005)


def _own_files(root: Path, plan: Plan) -> None:
    """What every container takes from its host: its names, its devices, its user."""
    etc = root / "etc"
    etc.mkdir(exist_ok=True)
    for name in FROM_HOST:
        source, target = Path("/etc") / name, etc / name
        if source.exists():
            # Replaced, not written through: in an image it is often a link to nowhere.
            target.unlink(missing_ok=True)
            shutil.copyfile(source, target)
    home = plan.home if plan.home.startswith("/") else "/"
    _add_line(etc / "passwd", plan.uid, f"user:x:{plan.uid}:{plan.gid}::{home}:/bin/sh")
    _add_line(etc / "group", plan.gid, f"user:x:{plan.gid}:")
    for name in ("proc", "sys", "dev"):
        _folder(root, f"/{name}")
        _mount("--rbind", f"/{name}", root / name)
    _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", _folder(root, "/tmp"))
    _folder(root, home)


def _add_line(path: Path, number: int, line: str) -> None:
    """Add an entry for an id that passwd or group does not have yet."""
    text = path.read_text(errors="surrogateescape") if path.exists() else ""
    if not any(entry.split(":")[2:3] == [str(number)] for entry in text.splitlines()):
        if text and not text.endswith("\n"):
            text += "\n"
        path.unlink(missing_ok=True)
        path.write_text(f"{text}{line}\n", errors="surrogateescape")


def _volumes(root: Path) -> None:
    r"""Honour /etc/fstab as enroot writes it: binds of the root's own folders, \040 a space."""
    table = root / "etc" / "fstab"
    for line in table.read_text().splitlines() if table.exists() else ():
        fields = [field.replace("\\040", " ") for field in line.split()]
        if len(fields) < 4 or fields[0].startswith("#") or "bind" not in fields[3].split(","):
            continue
        target = _folder(root, fields[1])
        source = fields[0].replace("${ENROOT_ROOTFS}", str(root))
        _mount("--bind", source, target)
        kept = [word for word in fields[3].split(",") if word in ("nosuid", "nodev", "ro")]
        _mount("-o", ",".join(["remount", "bind", *kept]), target)


def _bind(source: Path, root: Path, target: str, read_only: bool) -> None:
    if source.is_dir():
        place = _folder(root, target)
    else:
        place = _inside(root, target)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    _mount("--rbind", source, place)
    if read_only:
        _mount("-o", "remount,bind,ro", place)


def _folder(root: Path, path: str) -> Path:
    place = _inside(root, path)
    place.mkdir(parents=True, exist_ok=True)
    return place


def _inside(root: Path, path: str) -> Path:
    """A path of the container as seen from outside; links in it are followed inside the root."""
    place = root
    for part in Path(path).parts[1:]:
        place = place / part
        for _ in range(40):
            if not place.is_symlink():
                break
            link = str(place.readlink())
            base = root if link.startswith("/") else place.parent
            place = Path(os.path.normpath(base / link.lstrip("/")))
            if not place.is_relative_to(root):
                place = root
    return place


def start_words(plan: Plan) -> list[str]:
    """The login shell of the container's user with /etc/rc and the command.

    An image without /etc/rc starts in the home folder, with the command alone or a shell.
    """
    shell = _login_shell(plan.uid)
    if Path("/etc/rc").is_file():
        return [shell, "/etc/rc", *plan.command]
    os.chdir(plan.home if Path(plan.home).is_dir() else "/")
    return [shell, "-c", 'exec "$@"', shell, *plan.command] if plan.command else [shell]


def _login_shell(uid: int) -> str:
    for entry in Path("/etc/passwd").read_text(errors="surrogateescape").splitlines():
        fields = entry.split(":")
        if len(fields) > 6 and fields[2] == str(uid) and _is_shell(fields[6]):
            return fields[6]
    return "/bin/sh"


def _is_shell(path: str) -> bool:
    """Whether commands can be run by it; /usr/sbin/nologin and /bin/false are no shells."""
    return os.access(path, os.X_OK) and Path(path).name not in ("nologin", "false")


def _mount(*words: str | Path) -> None:
    PROGRAMS.capture(["mount", *words])
