"""Processes of this machine, found in /proc by the variables they were started with."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path


def having(variables: Mapping[str, str | None]) -> list[int]:
    """Return processes started with these variables (None: any value), and their offspring.

    Zombies are not included.
    """
    parents = {pid: parent(pid) for pid in _all()}
    found = {pid for pid, above in parents.items() if above and _has(pid, variables)}
    size = -1
    while size != len(found):
        size = len(found)
        found |= {pid for pid, above in parents.items() if above in found}
    return sorted(found)


def parent(pid: int) -> int:
    """Return the parent's number; 0 once the process has ended."""
    return _parent(_read(pid, "stat"))


def program(pid: int) -> int:
    """Return the process that works for a client of `tests.support.warm`; any other itself."""
    return _stands_for(_read(pid, "stat")) or pid


def descendants(pid: int) -> list[int]:
    """Return all processes below one, in any session; `program()` of one counts as below it."""
    children: dict[int, list[int]] = {}
    for one in _all():
        stat = _read(one, "stat")
        children.setdefault(_parent(stat), []).append(one)
        if stands_for := _stands_for(stat):
            children.setdefault(one, []).append(stands_for)
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def command(pid: int) -> str:
    """Return the command line of a process; empty once it has ended."""
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def leave_room_for_numbers() -> None:
    """Make sure that the next thousand process numbers rise without wrapping around."""
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    while os.waitpid(newest := os.posix_spawnp("true", ["true"], os.environ), 0):
        if newest < most - 1000:
            break


def kill(pids: Iterable[int], signal_number: int = signal.SIGKILL) -> None:
    """Send each process a signal; ignores those that are gone already."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)


@contextlib.contextmanager
def slowed(pids: Iterable[int]) -> Iterator[None]:
    """Let processes run a tenth of the time, to save CPU time for runs that are only waited for."""
    over = threading.Event()
    handles = [os.pidfd_open(pid) for pid in pids]

    def send(number: int) -> None:
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)

    def work() -> None:
        while not over.wait(0.05):
            send(signal.SIGSTOP)
            over.wait(0.45)
            send(signal.SIGCONT)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for handle in handles:
            os.close(handle)


def _parent(stat: bytes) -> int:
    fields = stat.rpartition(b")")[2].split()
    return int(fields[1]) if fields and fields[0] not in (b"Z", b"X") else 0


def _stands_for(stat: bytes) -> int:
    """Parse the name that tests/support/warm/client.py gives itself; 0 for any other process."""
    name = stat.partition(b"(")[2].rpartition(b")")[0]
    return int(name.removeprefix(b"warm ")) if name.startswith(b"warm ") and _parent(stat) else 0


def _has(pid: int, variables: Mapping[str, str | None]) -> bool:
    pairs = (pair.partition(b"=") for pair in _read(pid, "environ").split(b"\0"))
    environ = {name.decode(errors="replace"): value for name, _, value in pairs}
    return all(
        name in environ and (value is None or environ[name] == value.encode())
        for name, value in variables.items()
    )


def _all() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _read(pid: int, what: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{what}").read_bytes()
    return b""
