"""A process that does not answer, seen from another one of the same machine.

Python's faulthandler writes the stacks of a process on a signal, even while a thread of it does
not let go of the interpreter's lock. It writes into a file without a name (memfd), which others
find under /proc; so nothing is left on a disk, and no process is sent a signal that does not
expect it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SIGNAL = signal.SIGUSR2
WAIT = 2.0
"""Seconds that a process gets to write its stacks."""


@dataclass(frozen=True)
class Process:
    """Where a rank runs, and where it will write its stacks; told to all ranks at the start."""

    host: str
    pid: int
    file: int | None  # its descriptor; None where the system has no such files
    name: str  # of the file, so that a process of the same number is not taken for it

    @property
    def here(self) -> bool:
        return self.host == socket.gethostname()

    def told(self) -> str:
        """Say why it does not answer, as far as can be seen from here."""
        what = f"its process {self.pid} on {self.host}"
        if not self.here:
            return f"{what} does not answer"
        with suppress(OSError, IndexError):
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return f"{what} {_STATES.get(state, 'does not answer')}"
        return f"{what} does not answer, or is gone"

    def stacks(self) -> str:
        """Let it write its stacks; empty if it cannot, or is on another machine."""
        if not self.here or self.file is None:
            return ""
        path = Path(f"/proc/{self.pid}/fd/{self.file}")
        with suppress(OSError):
            if self.name not in str(path.readlink()):
                return ""
            before = path.stat().st_size
            os.kill(self.pid, SIGNAL)
            end = time.monotonic() + WAIT
            while time.monotonic() < end and path.stat().st_size == before:
                time.sleep(0.05)
            time.sleep(0.05)  # it is written in several pieces
            return path.read_bytes()[before:].decode(errors="replace").strip()
        return ""


def present_itself() -> Process:
    """Make this process one that writes its stacks when it is sent the signal."""
    name, file = f"stacks-{uuid.uuid4().hex}", None
    if hasattr(os, "memfd_create"):
        file = os.memfd_create(name)
        faulthandler.register(SIGNAL, file=file, all_threads=True)
    return Process(socket.gethostname(), os.getpid(), file, name)


_STATES = {
    "T": "is stopped by a signal (SIGCONT lets it go on)",
    "t": "is stopped by a debugger",
    "D": "waits for a disk, a file system or a driver",
    "Z": "has ended",
    "R": "does not answer, and is computing",
}
