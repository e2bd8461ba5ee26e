"""Choose how to start a sqsh, check the request, and become the program that starts it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from sqshforge.errors import MissingError, RequestError
from sqshforge.host.programs import Programs
from sqshforge.run import enroot, passed, warm
from sqshforge.run.container import Plan
from sqshforge.run.mounts import Mount

RUNTIMES = ("auto", "enroot", "builtin")  # auto: enroot if it is installed
MAGIC = b"hsqs"  # the first bytes of every squash file
SIZE_AT = 40  # the offset in its superblock of its size in bytes, a 64-bit number


def run(
    image: Path,
    command: Sequence[str],
    *,
    mounts: Sequence[Mount] = (),
    environment: Mapping[str, str] | None = None,
    programs: Programs | None = None,
    runtime: str = "auto",
    fuse: bool | None = None,
) -> NoReturn:
    """Become a command in a sqsh; without a command, the image's own.

    This process is the command from then on: signals and exit code are the command's own.
    `runtime` is one of `RUNTIMES`; `fuse` says whether squashfuse mounts the file (None: only if
    the kernel cannot). Raises `RequestError` if the file is not a sqsh, `MissingError` for programs
    that are not installed or rights that are not given.
    """
    programs = programs or Programs()
    environment = environment or {}
    passed.forget_coerced()
    image = image.absolute()
    require_sqsh(image)
    if runtime == "enroot" or (runtime == "auto" and programs.which("enroot")):
        call = enroot.call(image, command, mounts, environment, programs)
        warm.in_background(image)
        _become(call.argv, call.environment)
    _require_rights(programs, fuse=os.geteuid() != 0)
    plan = Plan(
        image=str(image),
        command=tuple(command),
        mounts=tuple((str(one.source), one.target, one.read_only) for one in mounts),
        environment=dict(environment),
        uid=os.geteuid(),
        gid=os.getegid(),
        fuse=fuse,
    )
    argv = builtin_command(programs.require("unshare"), plan)
    warm.in_background(image)
    _become(argv, os.environ)


def traced_command(image: Path, command: Sequence[str], log: str, programs: Programs) -> list[str]:
    """The call that starts a command in a sqsh and logs the reads of its files in the file `log`.

    Raises `MissingError` for programs that are not installed or rights that are not given.
    """
    _require_rights(programs, fuse=True)
    passed.forget_coerced()
    plan = Plan(str(image), tuple(command), (), {}, os.geteuid(), os.getegid(), True, log)
    return builtin_command(programs.require("unshare"), plan)


def require_sqsh(image: Path) -> None:
    """Raise `RequestError` if a file is not a complete squash file."""
    head = b""
    try:
        if not image.is_fifo():  # opening it would wait for a writer
            with image.open("rb") as file:
                head = file.read(SIZE_AT + 8)
    except OSError as error:
        raise RequestError(
            f"the file cannot be read: {error.strerror}",
            where=str(image),
            fix="make sqsh TARGET=... packs a target to build/",
        ) from None
    if not head.startswith(MAGIC) or len(head) < SIZE_AT + 8:
        raise RequestError(
            "the file is not a squash file", where=str(image), fix="name a .sqsh file"
        )
    promised = int.from_bytes(head[SIZE_AT:], "little")
    if image.stat().st_size < promised:
        raise RequestError(
            f"the squash file is cut short: {image.stat().st_size:,} of {promised:,} bytes",
            where=str(image),
            fix="copy or pack it again",
        )


def builtin_command(unshare: Path, plan: Plan) -> list[str]:
    """The call that enters a mount namespace (and, without root, a user namespace first).

    `-I` and `-S` make Python skip what the start does not need, such as site packages; so the
    package's own folder is put on the path here.
    """
    # "slave": later mounts of the host, such as an automounter's, show inside, but not vice versa.
    argv = [str(unshare), "--mount", "--propagation", "slave"]
    if plan.uid != 0:
        argv += ["--user", "--map-root-user"]
    package = str(Path(__file__).resolve().parent.parent.parent)
    code = (
        f"import sys; sys.path.insert(0, {package!r}); "
        "from sqshforge.run.container import main; main(*sys.argv[1:])"
    )
    words = dict(plan.__dict__)
    # The command stays separate words: one may have 128 KiB, all together much more.
    command = words.pop("command")
    return [*argv, sys.executable, "-I", "-S", "-c", code, json.dumps(words), *command]


def _become(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process, with the default actions for signals that Python ignores."""
    sys.stdout.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execve(argv[0], [*argv], environment)


def _require_rights(programs: Programs, *, fuse: bool) -> None:
    """Raise `MissingError` if this user may not mount or, with `fuse`, squashfuse cannot run."""
    as_root = os.geteuid() == 0
    user = [] if as_root else ["--user", "--map-root-user"]
    tried = programs.attempt(["unshare", *user, "--mount", "true"])
    reason = (tried.err.strip().splitlines() or ["no reason given"])[-1]
    if tried.code != 0 and as_root:
        raise MissingError(
            f"root may not mount here: {reason}",
            fix="run with CAP_SYS_ADMIN (in a container of docker: --privileged)",
        )
    if tried.code != 0:
        raise MissingError(
            f"this machine gives ordinary users no user namespaces: {reason}",
            fix="as root: sysctl kernel.unprivileged_userns_clone=1 (Debian) or "
            "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu)",
        )
    if not fuse:
        return
    programs.require("squashfuse", "it mounts a sqsh without the kernel's squashfs")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise MissingError(
            "/dev/fuse is not there" + ("" if as_root else " or not for ordinary users"),
            where="/dev/fuse",
            fix="as root: modprobe fuse && chmod 0666 /dev/fuse (udev's usual mode)",
        )
