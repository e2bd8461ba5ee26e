"""The processes that this one has started: which they are, how they ended, and how to end them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path


def own_children() -> list[int]:
    """The children that this process has started.

    This excludes those that it had before it became this program: enroot's processes that serve the
    files of the root, which must not be signaled.
    """
    return [pid for pid in _children(os.getpid()) if pid not in INHERITED]


def workers() -> list[int]:
    """The processes that train: the children, or what a profiler among them has started."""
    return [pid for child in own_children() for pid in _pythons(child) or [child]]


def exit_code(pid: int) -> int | None:
    """The exit code of a child that has ended but was not collected, -n for signal n; else None."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # collected at this moment
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def has_ended(pid: int) -> bool:
    """Tell whether a child has ended, collected or not."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def signal_name(number: int) -> str:
    """Name a signal; real-time ones, which libraries use, have only a number."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def kill_groups(pids: Iterable[int]) -> None:
    """Kill children (SIGKILL) and all that they have started, which may outlive them.

    Torchrun makes each of its processes the leader of a group.
    """
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        if not has_ended(pid):  # the leader of no group
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_ended(pids: Iterable[int], seconds: float) -> list[int]:
    """Wait up to `seconds` until these children have ended; return those that have not."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if not has_ended(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _pythons(parent: int) -> list[int]:
    """Return the process itself if it runs this interpreter, else those below it that do."""
    if _is_python(parent):
        return [parent]
    return [pid for child in _children(parent) for pid in _pythons(child)]


def _is_python(pid: int) -> bool:
    """Tell whether a process was started as this interpreter."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"{sys.executable}\0".encode())
    return False


def _children(parent: int) -> list[int]:
    """The children of a process, including those that have ended but were not collected."""
    return _listed(parent) if KERNEL_LISTS else _searched(parent)


def _listed(parent: int) -> list[int]:
    """Read `_children` from the kernel's own lists: one small file for each thread."""
    threads: list[str] = []
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the parent has ended
        # A thread that ends leaves its children to another one, which may have been read already.
        while threads != (now := os.listdir(f"/proc/{parent}/task")):  # noqa: PTH208
            threads, found = now, []
            for thread in threads:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    listed = Path(f"/proc/{parent}/task/{thread}/children").read_bytes()
                    found += map(int, listed.split())
    return found


def _searched(parent: int) -> list[int]:
    """Find `_children` by looking at all processes, some thousands on a node of 200 cores."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            if folder.name.isdigit():
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) == parent:
                    found.append(int(folder.name))
    return found


KERNEL_LISTS = Path("/proc/thread-self/children").exists()
"""Whether the kernel lists children (CONFIG_PROC_CHILDREN, which distributions set)."""

INHERITED = frozenset(_children(os.getpid()))
"""The children of this process when this module was loaded, which is before it starts any."""
