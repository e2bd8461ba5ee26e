"""The process beside a container: it serves its FUSE mounts and clears up when it has ended.

It is no child of the command, which may wait for all its children, or end them all. It lives in
the container's mount namespace until the command ends, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sqshforge.errors import SqshforgeError, WorkError
from sqshforge.host import syscalls
from sqshforge.host.programs import failed

TIMEOUT = 10.0  # seconds for a FUSE server to come up
MESSAGE = 1 << 16  # bytes; more than any request or answer has
MOUNTED = "mounted"

# Slurm signals all processes of a step, whatever their session: none of these may pull the file
# system from under a command that is just saving its work. libfuse leaves ignored ones ignored.
IGNORED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGTSTP,
    signal.SIGPIPE,
)


@dataclass(frozen=True)
class Supervisor:
    """The supervisor of this process, as long as this process sets the container up."""

    line: socket.socket
    place: Path  # an empty folder of the host to mount on

    def serve(self, argv: Sequence[str | Path], mountpoint: Path, log: Path | None = None) -> None:
        """Have a FUSE server run in the foreground, and wait until it has mounted.

        What it says goes into the file `log` where one is named. Raises `WorkError` with the
        server's own words where it does not mount.
        """
        words = [str(word) for word in argv]
        self.line.send(json.dumps([words, str(mountpoint), str(log or "")]).encode())
        answer = _heard(self.line).decode()
        if answer != MOUNTED:
            raise WorkError(answer or "the process that serves the image's files has ended")

    def set_up(self) -> None:
        """Say that nothing is mounted on `place` any more: it is removed."""
        self.line.close()


def start() -> Supervisor:
    """Start the supervisor of this process, which is in the container's namespaces already."""
    watched = os.pidfd_open(os.getpid())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        try:
            if os.fork() == 0:  # whose parent ends at once
                ours.close()
                _keep(watched, theirs)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(watched)
    theirs.close()
    place = _heard(ours)
    if not place:
        raise WorkError(f"cannot create a folder in {tempfile.gettempdir()}")
    return Supervisor(ours, Path(os.fsdecode(place)))


def _keep(watched: int, line: socket.socket) -> NoReturn:
    """Serve until the watched process ends; then end what it left."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # By no link: what is mounted on it is found again by its path.
    place = Path(tempfile.mkdtemp(prefix="sqshforge-")).resolve()
    parent = os.open(place.parent, os.O_PATH | os.O_DIRECTORY)  # the root will be another
    _let_go({0, 1, 2, watched, line.fileno(), parent})
    with contextlib.suppress(OSError):  # it was killed meanwhile
        line.send(os.fsencode(place))
    servers = _serve_until_set_up(line)
    with contextlib.suppress(OSError):  # it is still mounted on, if the set-up was killed
        os.rmdir(place.name, dir_fd=parent)
        os.close(parent)
    select.select([watched], [], [])
    _end_all_but({os.getpid(), *servers})
    with contextlib.suppress(OSError):
        syscalls.detach(place)
        os.rmdir(place.name, dir_fd=parent)
    os._exit(0)  # the servers end with their parent


def _serve_until_set_up(line: socket.socket) -> set[int]:
    """Start the servers that are asked for, until nobody is left to ask; their numbers."""
    servers = set()
    while request := _heard(line):
        argv, mountpoint, log = json.loads(request)
        try:
            servers.add(_serve(argv, Path(mountpoint), log))
            answer = MOUNTED
        except (OSError, SqshforgeError) as error:
            answer = str(error)
        with contextlib.suppress(OSError):
            line.send(answer.encode()[:MESSAGE])
    line.close()
    return servers


def _heard(line: socket.socket) -> bytes:
    """What the other side says; nothing where it has closed the line, or was killed."""
    with contextlib.suppress(ConnectionError):
        return line.recv(MESSAGE)
    return b""


def _let_go(kept: set[int]) -> None:
    """Hold nothing of the caller: neither its terminal, nor its open files, nor its folder."""
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    close_all_but(kept)


def close_all_but(kept: set[int]) -> None:
    """Close this process's descriptors except for these."""
    listed = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    for descriptor in listed - kept:
        with contextlib.suppress(OSError):  # the one that listed them is closed already
            os.close(descriptor)


def _serve(argv: Sequence[str], mountpoint: Path, log: str) -> int:
    """Start a server that ends with this process; its number, once it has mounted."""
    supervisor = os.getpid()
    before = mountpoint.stat().st_dev
    # No pipe: nobody reads it later on, and it must not fill up.
    said = os.open(log, os.O_RDWR) if log else os.memfd_create("stderr")
    server = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=said,
        preexec_fn=lambda: syscalls.die_with_parent(signal.SIGKILL, supervisor),
    )
    deadline = time.monotonic() + TIMEOUT
    while _device(mountpoint) == before:
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            lines = os.pread(said, MESSAGE, 0).decode(errors="replace").splitlines()
            raise failed(argv, server.wait(), lines)
        time.sleep(0.002)
    os.close(said)
    return server.pid


def _device(mountpoint: Path) -> int:
    try:
        return mountpoint.stat().st_dev
    except OSError as error:  # it has mounted, and what it serves is not sound
        raise WorkError(f"the image's root folder cannot be read: {error.strerror}") from None


def _end_all_but(spared: set[int]) -> None:
    """Kill -9 all other processes of this mount namespace, again until there are none."""
    pause = 0.01
    while found := _in_this_namespace() - spared:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def _in_this_namespace() -> set[int]:
    mine = Path("/proc/self/ns/mnt").stat().st_ino
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # ended meanwhile, or another user's
                if (entry / "ns" / "mnt").stat().st_ino == mine:
                    found.add(int(entry.name))
    return found
