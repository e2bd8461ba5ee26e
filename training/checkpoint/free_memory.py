"""How much free memory this node has for files: what the kernel, cgroups and tmpfs allow.

A tmpfs takes memory as its files are written, from the cgroup of the process that writes. Paths are
looked for below `root`, which is another folder only in tests. Light: no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

NO_LIMIT = 1 << 60  # bytes; a version 1 cgroup without a limit has a larger number
HERE = Path("/")


def free_memory(root: Path = HERE) -> int:
    """Bytes that this process can get, page cache included; 0 if that is not known."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    machine = int(found[1]) * 1024 if found else 0
    return max(0, min([machine, *_left_by_cgroups(root)]))


def free_in(folder: Path, root: Path = HERE) -> int:
    """Bytes that files in a tmpfs can still take, by its own free space and by free memory."""
    return _bounded(folder, free_memory(root))


def roomiest(folders: Sequence[Path], root: Path = HERE) -> Path:
    """Return the folder whose tmpfs can take the most bytes, the first of equal ones.

    Memory is read once: most tmpfs can take all of it, so that what other processes take and give
    back between two readings would decide.
    """
    memory = free_memory(root)
    return max(folders, key=lambda folder: _bounded(folder, memory))


def _bounded(folder: Path, memory: int) -> int:
    found = os.statvfs(folder)
    is_bounded = found.f_blocks > 0
    return min(memory, found.f_bavail * found.f_frsize) if is_bounded else memory


def is_tmpfs(folder: Path) -> bool:
    """Tell whether what is written to a folder stays in memory."""
    with suppress(OSError):
        device = folder.stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in _text(HERE / "proc/self/mountinfo").splitlines():
            mount, _, system = line.partition(" - ")
            if mount.split()[2] == number:
                return system.split()[0] == "tmpfs"
    return False


def _left_by_cgroups(root: Path) -> Iterator[int]:
    """The bytes that each limit leaves to this process; the cache of files counts as free."""
    for folder, version in _cgroups(root):
        name, total = ("current", "") if version == 2 else ("usage_in_bytes", "total_")
        used = _number(_text(folder / f"memory.{name}")) or 0
        counts = _text(folder / "memory.stat")
        files = re.findall(rf"^{total}(?:in)?active_file (\d+)$", counts, re.MULTILINE)
        # A process above memory.high is slowed down until it gives memory back.
        limits = ("max", "high") if version == 2 else ("limit_in_bytes",)
        for limit in (_number(_text(folder / f"memory.{one}")) for one in limits):
            if limit is not None and limit < NO_LIMIT:
                yield limit - used + sum(map(int, files))


def _cgroups(root: Path) -> Iterator[tuple[Path, int]]:
    """The folders of the cgroups whose memory limits apply to this process, and their version.

    These are its own cgroup and all above it that are mounted here.
    """
    paths: dict[int, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths[1] = path
        elif number == "0" and not controllers:
            paths[2] = path
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        top, point = (_unescaped(word) for word in mount.split()[3:5])
        kind, _, options = (*system.split(), "", "", "")[:3]
        version = 2 if kind == "cgroup2" else 1
        if kind != "cgroup2" and not (kind == "cgroup" and "memory" in options.split(",")):
            continue
        below = _below(top, paths[version]) if version in paths else None
        if below is not None:
            folder = root / point.lstrip("/")
            yield folder, version
            for name in below:
                folder /= name
                yield folder, version


def _below(top: str, path: str) -> tuple[str, ...] | None:
    """The folders from the top of a mount down to a cgroup; None if it is not in that mount.

    In a cgroup namespace, paths above its root start with /..: then only the top can be read.
    """
    above, own = PurePosixPath(top).parts[1:], PurePosixPath(path).parts[1:]
    if own[: len(above)] == above:
        rest = own[len(above) :]
        return None if ".." in rest else rest
    return () if set(above) == {".."} else None


def _unescaped(word: str) -> str:
    """Decode a path of mountinfo, in which a space is a backslash and 040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape").strip()
    except OSError:
        return ""
