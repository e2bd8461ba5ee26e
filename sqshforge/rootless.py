"""An ordinary user as root of a user namespace, where what only root can read and mount is theirs.

The process itself steps into it, so that signals and the exit code are its own. (What is started
by `buildah unshare` lives on where buildah gets a signal, and its own death is not told.)
"""

from __future__ import annotations

import ctypes
import os
import pwd
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqshforge.errors import MissingError
from sqshforge.programs import Programs
from sqshforge.syscalls import CLONE_NEWUSER

CLONE_NEWNS = 0x00020000
HOLDER = "echo $$; read -r _ || :"  # ends when its standard input does: however we end, it is gone
MEND = (
    "pack as root; or as root: sysctl user.max_user_namespaces=10000, and where they are known "
    "kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0"
)

_libc = ctypes.CDLL(None, use_errno=True)


def enter(address: str, programs: Programs) -> None:
    """Make an ordinary user root of a user namespace, with mounts of its own, to pack a source.

    Only for the sources that need it; nothing is done for root. There is no way back, and no
    thread may run yet. Raises `MissingError` where this user can have no such namespace.
    """
    if os.geteuid() == 0:
        return
    if address.startswith("buildah://"):
        _enter_buildahs(programs)
    elif address.startswith("rootfs:"):
        _enter_own()


def _enter_own() -> None:
    """Enter a namespace of our own: what is this user's is root's there, whatever its mode."""
    uid, gid = os.geteuid(), os.getegid()
    with _allowed():
        _check(_libc.unshare(CLONE_NEWUSER | CLONE_NEWNS))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def _enter_buildahs(programs: Programs) -> None:
    """Enter a namespace as buildah makes it, with all uids and gids that are this user's.

    There alone it can mount the user's images.
    """
    buildah = programs.require("buildah", "the source is in its storage")
    for program in ("newuidmap", "newgidmap"):
        if programs.which(program) is None:
            raise MissingError(
                f"the program {program} is not installed "
                "(without it buildah mounts no image for an ordinary user)",
                mend="apt-get install uidmap",
            )
    pipe = subprocess.PIPE
    argv: list[str | Path] = [buildah, "unshare", "--", "sh", "-c", HOLDER]
    with programs.start(argv, stdin=pipe, stdout=pipe, stderr=pipe) as holder:
        assert holder.stdin is not None and holder.stdout is not None and holder.stderr is not None
        pid = holder.stdout.readline().strip()
        if not pid:
            said = holder.stderr.read().decode(errors="replace").strip()
            raise MissingError(f"buildah cannot make a user namespace: {said}", mend=MEND)
        _join(Path("/proc", pid.decode()))
        holder.stdin.close()
        holder.wait()


def _join(holder: Path) -> None:
    """Enter the user namespace of a process, and take over the variables that buildah set in it."""
    for name in ("uid", "gid"):
        ranges = (holder / f"{name}_map").read_text().splitlines()
        if sum(int(line.split()[2]) for line in ranges) == 1:
            raise MissingError(
                f"the user {_user()} has no range of {name}s, and an image has files of several",
                where=f"/etc/sub{name}",
                mend=f"as root: usermod --add-sub{name}s 100000-165535 {_user()} (a free range)",
            )
    variables = (holder / "environ").read_bytes().split(b"\0")
    with _allowed():
        namespace = os.open(holder / "ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.setns(namespace, CLONE_NEWUSER))
        finally:
            os.close(namespace)
        _check(_libc.unshare(CLONE_NEWNS))
    os.environb.update(dict(one.split(b"=", 1) for one in variables if b"=" in one))


@contextmanager
def _allowed() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MissingError(
            f"this machine gives its users no user namespaces: {error.strerror}", mend=MEND
        ) from None


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # it has no name on this machine
        return str(os.getuid())


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
