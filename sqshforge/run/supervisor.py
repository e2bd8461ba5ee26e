"""The supervisor: a process that serves a container's FUSE mounts and cleans up after its end.

It is not a child of the command, which may wait for all its children, or end them all. It lives in
the container's mount namespace until the command ends, in whatever way.
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
MESSAGE = 1 << 16  # bytes; more than any request or answer needs
MOUNTED = "mounted"

# Slurm signals all processes of a step, whatever their session: no such signal may take the file
# system from a command that is saving its work. libfuse keeps ignored signals ignored.
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
    """The connection to this process's supervisor while this process sets up the container."""

    line: socket.socket
    place: Path  # an empty folder of the host to mount on

    def serve(self, argv: Sequence[str | Path], mountpoint: Path, log: Path | None = None) -> None:
        """Start a FUSE server, which stays in the foreground, and wait until it has mounted.

        Its messages go to the file `log` if one is named. Raises `WorkError` with the server's
        message if it does not mount.
        """
        words = [str(word) for word in argv]
        self.line.send(json.dumps([words, str(mountpoint), str(log or "")]).encode())
        answer = _heard(self.line).decode()
        if answer != MOUNTED:
            raise WorkError(answer or "the process that serves the image's files has ended")

    def set_up(self) -> None:
        """Report the end of the set-up: nothing is mounted on `place` any more, so remove it."""
        self.line.close()


def start() -> Supervisor:
    """Start the supervisor of this process, which is already in the container's namespaces."""
    watched = os.pidfd_open(os.getpid())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        try:
            if os.fork() == 0:  # its parent ends at once
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
    """Serve until the watched process ends; then end the processes that it left."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # Resolved: mounts on it are found again by their path, which must not have a link.
    place = Path(tempfile.mkdtemp(prefix="sqshforge-")).resolve()
    parent = os.open(place.parent, os.O_PATH | os.O_DIRECTORY)  # the root will change
    _let_go({0, 1, 2, watched, line.fileno(), parent})
    with contextlib.suppress(OSError):  # the starter was killed meanwhile
        line.send(os.fsencode(place))
    servers = _serve_until_set_up(line)
    with contextlib.suppress(OSError):  # it still has mounts if the set-up was killed
        os.rmdir(place.name, dir_fd=parent)
        os.close(parent)
    select.select([watched], [], [])
    _end_all_but({os.getpid(), *servers})
    with contextlib.suppress(OSError):
        syscalls.detach(place)
        os.rmdir(place.name, dir_fd=parent)
    os._exit(0)  # the servers end with their parent


def _serve_until_set_up(line: socket.socket) -> set[int]:
    """Start the requested servers until the line is closed; return their process ids."""
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
    """The next message from the other side; empty if it has closed the line or was killed."""
    with contextlib.suppress(ConnectionError):
        return line.recv(MESSAGE)
    return b""


def _let_go(kept: set[int]) -> None:
    """Let go of the caller's terminal, working folder and descriptors, except those in `kept`."""
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
        with contextlib.suppress(OSError):  # the descriptor of the listing is closed already
            os.close(descriptor)


def _serve(argv: Sequence[str], mountpoint: Path, log: str) -> int:
    """Start a server that ends with this process; return its process id once it has mounted."""
    supervisor = os.getpid()
    before = mountpoint.stat().st_dev
    # Not a pipe: nobody would read it later, and it would fill up.
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
    except OSError as error:  # the server has mounted, but its file system is broken
        raise WorkError(f"the image's root folder cannot be read: {error.strerror}") from None


def _end_all_but(spared: set[int]) -> None:
    """Kill all other processes of this mount namespace with SIGKILL, until there are none."""
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
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if (entry / "ns" / "mnt").stat().st_ino == mine:
                    found.add(int(entry.name))
    return found
