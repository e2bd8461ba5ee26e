"""Builds by an ordinary user: root of a user namespace, and a storage for buildah.

A child process enters the namespace and does the work there, so that the caller keeps its own
rights for later steps. (A process started by `buildah unshare` is no substitute: it survives a
signal to buildah, and its exit status is not reported.)
"""

from __future__ import annotations

import contextlib
import os
import pickle
import pwd
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

from sqshforge.errors import MissingError, SqshforgeError, WorkError
from sqshforge.host import suggest
from sqshforge.host.programs import Programs
from sqshforge.host.syscalls import CLONE_NEWNS, CLONE_NEWUSER, die_with_parent, enter, unshare

Result = TypeVar("Result")

HOLDER = "echo $$; read -r _ || :"  # ends with its standard input, so never outlives this process
FIX = (
    "pack as root; or as root: sysctl user.max_user_namespaces=10000, and where they are known "
    "kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0"
)


CONFIGURED = ("STORAGE_DRIVER", "CONTAINERS_STORAGE_CONF")  # the user's own choice
FUSE = Path("/dev/fuse")
COPYING = (
    "warning: buildah can mount no overlays for this user, so it copies all layers whole: the "
    "build takes many times as long, and tens of GB. To fix it: Linux 5.13 or later and a local "
    "disk (not NFS) for ~/.local/share/containers, or fuse-overlayfs and, as root, "
    "modprobe fuse && chmod 0666 /dev/fuse"
)


def call_as_root(work: Callable[[], Result], address: str, programs: Programs) -> Result:
    """Call a function that reads the image at an address, with the rights that it needs.

    For root this is a plain call. For an ordinary user the function runs in a child process, which
    is root of a user namespace if the source needs one; its result or error is passed back. A
    signal that ends this process also ends the child, which cleans up first.

    Raises what the function raises, and `MissingError` if this user cannot have such a namespace.
    """
    if os.geteuid() == 0:
        return work()
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _work(work, address, programs, writing, parent)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as answer:
            said = answer.read()
        status = os.waitpid(child, 0)[1]
    except BaseException:  # this process is to end: SIGTERM, Ctrl-C
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGTERM)
            os.waitpid(child, 0)
        raise
    if not said:
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "an error of its own"
        raise WorkError(f"the process that reads the image was ended by {how}", where=address)
    done, value = pickle.loads(said)
    if not done:
        raise value
    return value  # type: ignore[no-any-return]


def _work(
    work: Callable[[], object], address: str, programs: Programs, answer: int, parent: int
) -> NoReturn:
    """Do the work in the child, send the result or the error, and exit."""
    # A terminal interrupts the parent too, which then sends SIGTERM: once is enough.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = 1
    try:
        try:
            die_with_parent(signal.SIGTERM, parent)
            _enter(address, programs)
            die_with_parent(signal.SIGTERM, parent)  # a change of rights cancels the first call
            said: tuple[bool, object] = (True, work())
        except (SqshforgeError, OSError) as error:
            said = (False, error)
        with os.fdopen(answer, "wb") as file:
            file.write(pickle.dumps(said))
        code = 0
    except SystemExit as error:  # SIGTERM
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _enter(address: str, programs: Programs) -> None:
    """Become root of a user namespace, with mounts of its own, if the source needs it.

    There is no way back, and no thread may run yet. Raises `MissingError` if this user cannot have
    such a namespace.
    """
    if address.startswith("buildah://"):
        _enter_buildahs(programs)
    elif address.startswith("rootfs:"):
        _enter_own()


def _enter_own() -> None:
    """Enter a new namespace in which this user's files are root's, and so readable in any mode."""
    uid, gid = os.geteuid(), os.getegid()
    with _allowed():
        unshare(CLONE_NEWUSER | CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def _enter_buildahs(programs: Programs) -> None:
    """Enter a namespace that buildah makes, with all uids and gids of this user's ranges.

    Only there can buildah mount the user's images.
    """
    buildah = programs.require("buildah", "the source is in its storage")
    choose_buildah_storage(buildah, programs)
    for program in ("newuidmap", "newgidmap"):
        if programs.which(program) is None:
            raise MissingError(
                f"the program {program} is not installed "
                "(without it buildah mounts no image for an ordinary user)",
                fix=suggest.install(programs.which, program),
            )
    with holder([buildah, "unshare", "--"], programs) as process:
        _require_ranges(process)
        join(process)
        # The variables by which buildah's children know of the namespace.
        variables = (process / "environ").read_bytes().split(b"\0")
        os.environb.update(dict(one.split(b"=", 1) for one in variables if b"=" in one))


@contextmanager
def holder(argv: Sequence[str | Path], programs: Programs) -> Iterator[Path]:
    """Hold a user namespace for the length of a block; yield a /proc folder of a process in it.

    The command `argv` makes the namespace and starts the process. Raises `MissingError` if it
    cannot.
    """
    pipe = subprocess.PIPE
    words: list[str | Path] = [*argv, "sh", "-c", HOLDER]
    with programs.start(words, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None and process.stderr is not None
        pid = process.stdout.readline().strip()
        if not pid:
            said = process.stderr.read().decode(errors="replace").strip()
            name = Path(argv[0]).name
            raise MissingError(f"{name} cannot make a user namespace: {said}", fix=FIX)
        yield Path("/proc", pid.decode())
        process.stdin.close()
        process.wait()


def join(process: Path) -> None:
    """Enter the user namespace of a process, given by its /proc folder, with mounts of its own.

    There is no way back, and no thread may run yet. Raises `MissingError` if it is not allowed.
    """
    with _allowed():
        namespace = os.open(process / "ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter(namespace, CLONE_NEWUSER)
        finally:
            os.close(namespace)
        unshare(CLONE_NEWNS)


def _require_ranges(process: Path) -> None:
    for name in ("uid", "gid"):
        ranges = (process / f"{name}_map").read_text().splitlines()
        if sum(int(line.split()[2]) for line in ranges) == 1:
            raise MissingError(
                f"the user {_user()} has no range of {name}s, and an image has files of several",
                where=f"/etc/sub{name}",
                fix=f"as root: usermod --add-sub{name}s 100000-165535 {_user()} (a free range)",
            )


@contextmanager
def _allowed() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MissingError(
            f"this machine gives its users no user namespaces: {error.strerror}", fix=FIX
        ) from None


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # the user has no name on this machine
        return str(os.getuid())


def choose_buildah_storage(buildah: Path, programs: Programs) -> None:
    """Set the variables that make buildah use overlays, for this process and its children.

    Nothing changes for root, or if the user has configured a storage.

    By default, buildah 1.28 copies every layer whole (the driver vfs) although ordinary users can
    mount overlays since Linux 5.13: a build then takes many times as long, and disk space of the
    size of the image for each of its layers.
    """
    if os.geteuid() != 0 and not _is_configured(os.environ):
        for variables in _candidates(programs):
            if programs.attempt([buildah, "info"], env=variables).code == 0:
                os.environ.update(variables)
                return


def is_copying(info: Mapping[str, Mapping[str, object]]) -> bool:
    """Whether a storage, as `buildah info` describes it, copies layers whole."""
    return info["store"]["GraphDriverName"] == "vfs"


def _is_configured(environment: Mapping[str, str]) -> bool:
    if any(environment.get(name) for name in CONFIGURED):
        return True
    try:
        above = environment.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    except RuntimeError:  # neither HOME nor passwd names a home for this user
        return False
    return (Path(above) / "containers" / "storage.conf").exists()


def _candidates(programs: Programs) -> Iterator[dict[str, str]]:
    """The variables to try, the fastest way first."""
    yield {"STORAGE_DRIVER": "overlay"}
    fuse = programs.which("fuse-overlayfs")
    if fuse is not None and os.access(FUSE, os.R_OK | os.W_OK):
        yield {"STORAGE_DRIVER": "overlay", "STORAGE_OPTS": f"overlay.mount_program={fuse}"}
