"""Cgroups for a single test: programs started in one are confined, and end with it."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sqshforge.host import cgroups
from tests.support import processes

TIMEOUT = 120.0  # seconds until killed processes are gone


@dataclass(frozen=True)
class Cgroup:
    """A cgroup, given by the folder that represents it; everything below it is confined too."""

    folder: Path
    version: int

    def starting(self) -> tuple[str, ...]:
        """Return words that start a program in it."""
        return ("sh", "-c", 'echo $$ >"$0" && exec "$@"', str(self.folder / "cgroup.procs"))

    def below(self, name: str) -> Cgroup:
        """Make a cgroup below this one: in version 2, only the lowest ones may have processes."""
        (self.folder / name).mkdir()
        return Cgroup(self.folder / name, self.version)

    def out_of_memory(self) -> int:
        """Count the processes in it that the kernel has killed for lack of memory.

        Version 1 forgets those of a removed cgroup below it.
        """
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        shown = "\n".join(_texts(self.folder, name)[: 1 if self.version == 2 else None])
        return sum(map(int, re.findall(r"^oom_kill (\d+)$", shown, re.MULTILINE)))


@contextlib.contextmanager
def cgroup(controller: str, settings: dict[str, str], *, top: bool = False) -> Iterator[Cgroup]:
    """Make a cgroup with these settings, named as in version 2.

    It lies below this process's own cgroup, or with `top` at the top of the hierarchy: there a
    docker daemon has its own in every hierarchy under the same path. Skips the test if none can be
    made. At the end, everything that runs in it is killed.
    """
    groups = sorted(
        cgroups.groups(Path("/"), controller),
        # If both versions are mounted, the controller belongs to the first.
        key=lambda one: (one.version, len(one.folder.parts) * (1 if top else -1)),
    )
    if not groups:
        pytest.skip(f"no cgroup can be made: nothing of {controller} is mounted")
    place = groups[0]
    made = Cgroup(place.folder / f"sqshforge-test-{os.getpid()}", place.version)
    try:
        _make(made, controller, settings)
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        yield made
    finally:
        for folder in (made.folder, *(_elsewhere(made) if top else ())):
            _remove(folder)


def _make(made: Cgroup, controller: str, settings: dict[str, str]) -> None:
    if made.version == 2:
        subtree = made.folder.parent / "cgroup.subtree_control"
        if controller not in subtree.read_text().split():
            subtree.write_text(f"+{controller}")
    made.folder.mkdir()
    try:
        for name, text in settings.items():
            for file, value in _settings(made.version, name, text):
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


def _elsewhere(made: Cgroup) -> list[Path]:
    """Return the folders that a cgroup of the same name has in other hierarchies."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [Path(line.split()[4]) for line in lines if " - cgroup" in line]
    return [point / made.folder.name for point in points if point != made.folder.parent]


def _remove(folder: Path) -> None:
    """Kill everything in a cgroup, and remove it with those below."""

    def emptied() -> bool:
        left = [int(pid) for text in _texts(folder, "cgroup.procs") for pid in text.split()]
        processes.kill(left)
        return not left

    def removed() -> bool:
        with contextlib.suppress(OSError):  # busy until shortly after its last process has ended
            for place, _, _ in os.walk(folder, topdown=False):
                Path(place).rmdir()
        return not folder.exists()

    for done in (emptied, removed):
        _until(done, f"{folder} is not free: {_texts(folder, 'cgroup.procs')}")


def _until(done: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError(otherwise)
        time.sleep(0.05)


def _texts(folder: Path, name: str) -> list[str]:
    """Return the contents of the files of that name, starting with the cgroup's own."""
    found = []
    for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        with contextlib.suppress(OSError):  # it may vanish meanwhile
            found.append((place / name).read_text())
    return found
