"""The cgroups of this process: what they allow, and how much of that is left.

The files that are read lie below `root`, which is / except in tests. Nodes run this module from the
runtime in the image, so it uses only the standard library and Python 3.9.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

NO_LIMIT = 1 << 60  # bytes; a cgroup of version 1 without a limit has a number above this


@dataclass(frozen=True)
class Group:
    """A cgroup that this process is in, and the folder that shows it."""

    folder: Path
    version: int


def groups(root: Path, controller: str) -> Iterator[Group]:
    """The cgroups whose limits apply to this process: its own and its visible ancestors."""
    paths = _paths(root, controller)
    for line in file_text(root / "proc/self/mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        top, point = (_unescaped(word) for word in mount.split()[3:5])
        kind, _, options = (*system.split(), "", "", "")[:3]
        if kind == "cgroup2":
            version = 2
        elif kind == "cgroup" and controller in options.split(","):
            version = 1
        else:
            continue
        below = _below(top, paths[version]) if version in paths else None
        if below is None:
            continue
        folder = root / point.lstrip("/")
        yield Group(folder, version)
        for name in below:
            folder /= name
            yield Group(folder, version)


def free_memory(root: Path = Path("/")) -> int:
    """The bytes that this process can get without taking from others; page cache counts as free.

    Zero if unknown.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", file_text(root / "proc/meminfo"), re.MULTILINE)
    machine = int(found[1]) * 1024 if found else 0
    return max(0, min([machine, *_left(root)]))


def memory_limits(group: Group) -> list[int]:
    """The memory limits of a cgroup in bytes; empty if it has none."""
    # A process above memory.high is not killed, but slowed down until it releases some.
    names = ("max", "high") if group.version == 2 else ("limit_in_bytes",)
    found = (positive(file_text(group.folder / f"memory.{name}")) for name in names)
    return [limit for limit in found if limit is not None and limit < NO_LIMIT]


def _left(root: Path) -> Iterator[int]:
    """The bytes that each limit leaves."""
    for group in groups(root, "memory"):
        name, total = ("current", "") if group.version == 2 else ("usage_in_bytes", "total_")
        used = positive(file_text(group.folder / f"memory.{name}")) or 0
        counts = file_text(group.folder / "memory.stat")
        files = re.findall(rf"^{total}(?:in)?active_file (\d+)$", counts, re.MULTILINE)
        for limit in memory_limits(group):
            yield limit - used + sum(map(int, files))


def _paths(root: Path, controller: str) -> dict[int, str]:
    """The path of this process in the hierarchies that may have a controller, by version."""
    found = {}
    for line in file_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            found[1] = path
        elif number == "0" and not controllers:
            found[2] = path
    return found


def _below(top: str, path: str) -> tuple[str, ...] | None:
    """The folders that lead from the top of a mount to a cgroup; None if it is not below the top.

    In a cgroup namespace both paths are relative to the namespace's root, /. Paths above the root
    start with /.. and show no names, so only the top of such a mount can be read.
    """
    above, own = PurePosixPath(top).parts[1:], PurePosixPath(path).parts[1:]
    if own[: len(above)] == above:
        rest = own[len(above) :]
        return None if ".." in rest else rest
    return () if set(above) == {".."} else None


def _unescaped(word: str) -> str:
    """Decode a path of mountinfo, which writes a space as a backslash and 040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


def positive(text: str) -> int | None:
    """Parse a whole number above zero; return None for anything else ("max", -1, no text)."""
    return (int(text) or None) if text.isascii() and text.isdigit() else None


def file_text(path: Path) -> str:
    """The content of a small file; empty if it is missing or not readable."""
    try:
        return path.read_text(errors="surrogateescape").strip()
    except OSError:
        return ""
