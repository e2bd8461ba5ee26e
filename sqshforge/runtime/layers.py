"""The root of a container: the squash file under a writable layer that lives in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from sqshforge.errors import WorkError
from sqshforge.programs import Programs, failed
from sqshforge.runtime import syscalls
from sqshforge.runtime.paths import unescape

PROGRAMS = Programs()

PATIENCE = 10.0  # seconds for a FUSE server to come up

# What a batch system or a person sends to a job.
JOB_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)


def mount_root(image: str, place: Path, *, as_root: bool, fuse: bool | None) -> Path:
    """Mount all of it below `place`, an empty folder; the merged root."""
    mount("-t", "tmpfs", "-o", "mode=0755", "sqshforge", place)
    lower, upper, work, root = (place / name for name in ("lower", "upper", "work", "root"))
    for one in (lower, upper, work, root):
        one.mkdir()
    layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
    if not as_root:
        _serve(_squashfuse(), lower, "-f", image, lower)
        # The kernel's overlay would leave the image's files to their owner, root, whom this
        # namespace does not have; here all of them are the user's, as under enroot.
        overlay = PROGRAMS.require("fuse-overlayfs", "it makes a root writable for a user")
        _serve(overlay, root, "-f", "-o", f"{layers},squash_to_root", root)
        return root
    if fuse or not _mounted_by_kernel(image, lower, required=fuse is False):
        _serve(_squashfuse(), lower, "-f", "-o", "allow_other", image, lower)
    mount("-t", "overlay", "-o", layers, "overlay", root)
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


def _mounted_by_kernel(image: str, lower: Path, *, required: bool) -> bool:
    try:
        mount("-t", "squashfs", "-o", "loop,ro,nodev", image, lower)
    except WorkError:
        if required:
            raise
        return False  # no loop devices here, or a kernel without squashfs or its zstd
    return True


def _squashfuse() -> Path:
    return PROGRAMS.which("squashfuse_ll") or PROGRAMS.require("squashfuse")


def _serve(program: Path, mountpoint: Path, *words: str | Path) -> None:
    """Start a FUSE server; it ends with the command, whose process this one becomes."""
    setup = os.getpid()
    server = subprocess.Popen(
        [program, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: _be_server(setup),
    )
    deadline = time.monotonic() + PATIENCE
    while not os.path.ismount(mountpoint):
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            said = server.communicate()[1].decode(errors="replace").splitlines()
            raise failed([str(program)], server.returncode, said)
        time.sleep(0.005)


def _be_server(setup: int) -> None:
    """Outlive every signal to the job, and end with its command.

    Slurm signals all processes of a step; none of that may pull the file system from under a
    command that is just saving its work. libfuse leaves ignored signals ignored.
    """
    for number in (*JOB_SIGNALS, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    syscalls.die_with_parent(signal.SIGKILL, setup)
