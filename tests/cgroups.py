"""Cgroups of a test's own: what is started in one is confined, and ends with it."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sqshforge import limits
from tests import processes


@dataclass(frozen=True)
class Cgroup:
    """One of them, by the folder that shows it; a cgroup below it is confined with it."""

    folder: Path
    version: int

    def starting(self) -> tuple[str, ...]:
        """Words that start a program in it."""
        return ("sh", "-c", 'echo $$ >"$0" && exec "$@"', str(self.folder / "cgroup.procs"))

    def below(self, name: str) -> Cgroup:
        """Make one below this: version 2 has processes in the lowest ones only."""
        (self.folder / name).mkdir()
        return Cgroup(self.folder / name, self.version)

    def processes(self) -> list[int]:
        """The numbers of the processes in it and below."""
        return [int(word) for file in self._files("cgroup.procs") for word in file.split()]

    def out_of_memory(self) -> int:
        """How many processes in it and below the kernel has ended for want of memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        counts = re.findall(r"^oom_kill (\d+)$", "\n".join(self._files(name)), re.MULTILINE)
        return max(map(int, counts))  # version 2 counts those below too

    def _files(self, name: str) -> list[str]:
        found = []
        for path in (self.folder / name, *self.folder.rglob(name)):
            with contextlib.suppress(OSError):  # it may go with its container
                found.append(path.read_text())
        return found


@contextlib.contextmanager
def cgroup(controller: str, settings: dict[str, str]) -> Iterator[Cgroup]:
    """Make a cgroup with those settings, which have their names of version 2.

    It lies below the one that this process is in, or where that allows none, on top of all. Skips
    the test where none can be made. In the end all that runs in it is killed.
    """
    groups = sorted(limits._groups(Path("/"), controller), key=lambda one: -len(one.folder.parts))
    name = f"sqshforge-test-{os.getpid()}"
    reasons = []
    for place in (groups[0], groups[-1]) if groups else ():
        made = Cgroup(place.folder / name, place.version)
        try:
            _make(made, controller, settings)
        except OSError as error:
            reasons.append(str(error))
            continue
        try:
            yield made
        finally:
            _remove(made)
        return
    pytest.skip(f"no cgroup can be made: {', '.join(reasons) or 'none is mounted'}")


def _make(made: Cgroup, controller: str, settings: dict[str, str]) -> None:
    if made.version == 2:
        subtree = made.folder.parent / "cgroup.subtree_control"
        if controller not in subtree.read_text().split():
            subtree.write_text(f"+{controller}")
    made.folder.mkdir()
    try:
        for setting, text in settings.items():
            for file, value in _settings(made.version, setting, text):
                (made.folder / file).write_text(value)
    except OSError:
        made.folder.rmdir()
        raise


def _settings(version: int, name: str, text: str) -> list[tuple[str, str]]:
    if version == 2:
        return [(name, text)]
    if name == "cpu.max":
        quota, period = text.split()
        return [("cpu.cfs_period_us", period), ("cpu.cfs_quota_us", quota)]
    return [("memory.limit_in_bytes", text)]


def _remove(made: Cgroup) -> None:
    """End all that is in it; a cgroup is free a moment after its last process."""
    deadline = time.monotonic() + 30
    while left := made.processes():
        processes.kill(left)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes in {made.folder} do not end: {left}")
        time.sleep(0.05)
    below = [Path(top) for top, _, _ in os.walk(made.folder, topdown=False)]
    for folder in below:
        while True:
            try:
                folder.rmdir()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
