"""Choose how a sqsh is started, check the request, start it, pass signals and the exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from sqshforge.errors import MissingError, RequestError
from sqshforge.programs import Programs
from sqshforge.runtime.environment import merge
from sqshforge.runtime.inside import Plan
from sqshforge.runtime.mount import Mount

MAGIC = b"hsqs"  # the first bytes of every squash file
SIZE_AT = 40  # where its superblock says how many bytes it has, a 64-bit number

# What a batch system or a person sends to a job; each reaches the command.
FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)


def run(
    image: Path,
    command: Sequence[str],
    *,
    mounts: Sequence[Mount] = (),
    environment: Mapping[str, str] | None = None,
    programs: Programs | None = None,
    runtime: str = "auto",
    fuse: bool | None = None,
) -> int:
    """Run a command in a sqsh and return its exit code (128 + n for death by signal n).

    Without a command the image's own is run. `runtime` is auto, enroot or builtin; `fuse` says
    whether squashfuse mounts the file (None: only where the kernel does not let us).
    Raises `RequestError` for a file that is no sqsh, `MissingError` for what is not installed
    or not permitted.
    """
    programs = programs or Programs()
    environment = environment or {}
    image = image.absolute()
    require_sqsh(image)
    enroot = programs.which("enroot") if runtime in ("auto", "enroot") else None
    if runtime == "enroot" and enroot is None:
        raise MissingError("enroot is not installed", mend="leave the choice to sqshforge")
    if enroot is not None:
        argv = enroot_command(enroot, image, command, mounts, environment)
        return _wait(argv, dict(os.environ), programs)
    _require_rights(programs)
    inner = merge(os.environ, _read(image, "etc/environment", programs), environment)
    plan = Plan(
        image=str(image),
        command=tuple(command),
        mounts=tuple((str(one.source), one.target, one.read_only) for one in mounts),
        place=str(_place()),
        uid=os.geteuid(),
        gid=os.getegid(),
        fuse=fuse,
        home=inner.get("HOME", "/"),
    )
    return _wait(builtin_command(plan), inner, programs)


def require_sqsh(image: Path) -> None:
    """Raise `RequestError` for what is not a whole squash file."""
    try:
        with image.open("rb") as file:
            head = file.read(SIZE_AT + 8)
    except OSError as error:
        raise RequestError(
            f"the file cannot be read: {error.strerror}",
            where=str(image),
            mend="make sqsh TARGET=... packs a target to build/",
        ) from None
    if not head.startswith(MAGIC) or len(head) < SIZE_AT + 8:
        raise RequestError(
            "the file is not a squash file", where=str(image), mend="name a .sqsh file"
        )
    promised = int.from_bytes(head[SIZE_AT:], "little")
    if image.stat().st_size < promised:
        raise RequestError(
            f"the squash file is cut short: {image.stat().st_size:,} of {promised:,} bytes",
            where=str(image),
            mend="copy or pack it again",
        )


def enroot_command(
    enroot: Path,
    image: Path,
    command: Sequence[str],
    mounts: Sequence[Mount],
    environment: Mapping[str, str],
) -> list[str]:
    """The enroot call for a start straight from the file."""
    argv = [str(enroot), "start", "--rw"]
    for one in mounts:
        kind = "dir" if one.source.is_dir() else "file"
        options = f"x-create={kind},bind,{'ro' if one.read_only else 'rw'}"
        argv += ["--mount", f"{one.source}:{one.target}:{options}"]
    for name, value in environment.items():
        argv += ["--env", f"{name}={value}"]
    return [*argv, str(image), *command]


def builtin_command(plan: Plan) -> list[str]:
    """The call that enters a mount namespace (and, without root, a user namespace first).

    `-I` keeps PYTHONPATH, which is the image's by then, away from the host's Python; so the
    package's own folder is put on its path here.
    """
    argv = ["unshare", "--mount", "--propagation", "private"]
    if plan.uid != 0:
        argv += ["--user", "--map-root-user"]
    package = str(Path(__file__).resolve().parent.parent.parent)
    code = (
        f"import sys; sys.path.insert(0, {package!r}); "
        "from sqshforge.runtime.inside import main; main(sys.argv[1])"
    )
    return [*argv, sys.executable, "-I", "-S", "-c", code, json.dumps(plan.__dict__)]


def _wait(argv: Sequence[str], environment: dict[str, str], programs: Programs) -> int:
    """Start, hand signals on, wait. The terminal's own signals reach the child by themselves."""
    with programs.start(argv, env=environment) as child:
        waited = (*FORWARDED, signal.SIGCHLD)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
        try:
            while child.poll() is None:
                arrived = signal.sigtimedwait(waited, 1.0)
                # A positive code means the kernel sent it: to the whole process group.
                if arrived and arrived.si_signo != signal.SIGCHLD and arrived.si_code <= 0:
                    child.send_signal(arrived.si_signo)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code = child.returncode
    return code if code >= 0 else 128 - code


def _read(image: Path, name: str, programs: Programs) -> str:
    """A text file inside the squash file; empty where there is none."""
    found = programs.attempt(["unsquashfs", "-cat", image, name])
    return found.out if found.code == 0 else ""


def _place() -> Path:
    """The empty folder of this user that containers mount their roots on.

    Each mounts it in a namespace of its own, so that all can share it and none leaves a trace.
    """
    place = Path(tempfile.gettempdir()) / f"sqshforge-{os.geteuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    state = place.lstat()
    if place.is_symlink() or not place.is_dir() or state.st_uid != os.geteuid():
        raise RequestError("the folder is not yours", where=str(place), mend=f"remove {place}")
    return place


def _require_rights(programs: Programs) -> None:
    """Without root: user namespaces and /dev/fuse, or a `MissingError` with the way to them."""
    if os.geteuid() == 0:
        return
    tried = programs.attempt(["unshare", "--user", "--map-root-user", "--mount", "true"])
    if tried.code != 0:
        raise MissingError(
            "this machine gives ordinary users no user namespaces: "
            + (tried.err.strip().splitlines() or ["no reason given"])[-1],
            mend="as root: sysctl kernel.unprivileged_userns_clone=1 (Debian) or "
            "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu)",
        )
    programs.require("squashfuse", "it mounts a sqsh without root")
    programs.require("fuse-overlayfs", "it makes a root writable without root")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise MissingError(
            "/dev/fuse is not there or not for ordinary users",
            where="/dev/fuse",
            mend="as root: modprobe fuse && chmod 0666 /dev/fuse (udev's usual mode)",
        )
