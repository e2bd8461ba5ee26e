"""How many processors, how much memory and how much disk space this process may use.

The machine has what it has; a cgroup (a container's, a Slurm job's) or the job's own request may
allow less. The files lie below `root`, which is another folder only in tests.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sqshforge.errors import MissingError, WorkError
from sqshforge.host.terminal import human

MIB = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)
NO_LIMIT = 1 << 60  # bytes; a cgroup of version 1 without a limit has a number above this
# MiB: more than MOST makes mksquashfs no faster, less than LEAST (it takes 16 and more) slower.
# None of it changes the bytes.
MOST, LEAST = 256, 64


def processors(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> int:
    """The processors that this process may use, at least one.

    A quota of one and a half is one: a second thread would be stopped half of the time.
    """
    quotas = (int(quota) for quota in _processor_quotas(root))
    job = _job_processors(environment)
    allowed = len(os.sched_getaffinity(0))
    return max(1, min([allowed, *quotas, *([job] if job is not None else [])]))


def memory(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> int | None:
    """The bytes of memory that this process may use; None where nothing tells."""
    limits = [*_cgroup_memory(root), *_job_memory(root, environment)]
    total = re.search(r"^MemTotal:\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    if total is not None:
        limits.append(int(total[1]) * 1024)
    return min(limits, default=None)


def mksquashfs_memory(limit: int | None) -> str:
    """What to give mksquashfs's -mem: a quarter of the limit, within bounds.

    The rest is for what it needs beyond its buffers, and for the files that it reads.
    """
    quarter = MOST if limit is None else limit // 4 // MIB
    return f"{max(LEAST, min(MOST, quarter))}M"


def _processor_quotas(root: Path) -> Iterator[float]:
    for group in _groups(root, "cpu"):
        if group.version == 2:
            quota, _, period = _text(group.folder / "cpu.max").partition(" ")
        else:
            quota = _text(group.folder / "cpu.cfs_quota_us")
            period = _text(group.folder / "cpu.cfs_period_us")
        runtime, of = _positive(quota), _positive(period)
        if runtime is not None and of is not None:
            yield runtime / of


def _cgroup_memory(root: Path) -> Iterator[int]:
    for group in _groups(root, "memory"):
        # A process above memory.high is not killed, but slowed down until it gives some back.
        names = ("memory.max", "memory.high") if group.version == 2 else ("memory.limit_in_bytes",)
        for name in names:
            limit = _positive(_text(group.folder / name))
            if limit is not None and limit < NO_LIMIT:
                yield limit


def _job_processors(environment: Mapping[str, str]) -> int | None:
    """What a Slurm job asked for: it counts also where Slurm confines nobody."""
    asked = _positive(environment.get("SLURM_CPUS_PER_TASK", ""))
    return asked or _positive(environment.get("SLURM_CPUS_ON_NODE", ""))


def _job_memory(root: Path, environment: Mapping[str, str]) -> Iterator[int]:
    node = _positive(environment.get("SLURM_MEM_PER_NODE", ""))
    if node is not None:
        yield node * MIB
    each = _positive(environment.get("SLURM_MEM_PER_CPU", ""))
    if each is not None:
        yield each * MIB * (_job_processors(environment) or processors(root, environment))


@dataclass(frozen=True)
class _Group:
    """A cgroup that this process is in, by the folder that shows it."""

    folder: Path
    version: int


def _groups(root: Path, controller: str) -> Iterator[_Group]:
    """The cgroups whose limits hold for this process: its own and all above it that show."""
    paths = _paths(root, controller)
    for line in _text(root / "proc/self/mountinfo").splitlines():
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
        yield _Group(folder, version)
        for name in below:
            folder /= name
            yield _Group(folder, version)


def _paths(root: Path, controller: str) -> dict[int, str]:
    """Where this process is in the hierarchies that may have a controller, by their version."""
    found = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            found[1] = path
        elif number == "0" and not controllers:
            found[2] = path
    return found


def _below(top: str, path: str) -> tuple[str, ...] | None:
    """The folders that lead from the top of a mount to a cgroup; None where it is not in there.

    In a cgroup namespace both are told from the namespace's own root, which is /: what lies above
    it starts with /.. and shows no names, so that of such a mount only the top can be read.
    """
    above, own = PurePosixPath(top).parts[1:], PurePosixPath(path).parts[1:]
    if own[: len(above)] == above:
        rest = own[len(above) :]
        return None if ".." in rest else rest
    return () if set(above) == {".."} else None


def _unescaped(word: str) -> str:
    """A path as mountinfo writes it, where a space is a backslash and 040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


def _positive(text: str) -> int | None:
    """A whole number above zero; None for anything else ("max", -1, nothing at all)."""
    return (int(text) or None) if text.isascii() and text.isdigit() else None


def _text(path: Path) -> str:
    """What is in a small file; empty where it is not there or not for us."""
    try:
        return path.read_text(errors="surrogateescape").strip()
    except OSError:
        return ""


def require_space(folder: Path, needed: int, work: str) -> None:
    """Raise `MissingError` where a folder's file system has fewer than `needed` bytes free."""
    existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise MissingError(
            f"the disk is too small for {work}: it needs {needed:,} bytes ({human(needed)}), "
            f"{free:,} are free, {needed - free:,} are missing",
            where=str(folder),
            fix=f"free {human(needed - free)} on the file system of {existing}",
        )


@dataclass(frozen=True)
class FullDisk:
    """A folder whose file system has no room left, or none for this user, and that in words."""

    folder: Path
    said: str

    @classmethod
    def of(cls, error: OSError | WorkError, folder: Path) -> FullDisk | None:
        """What an error comes from in work that writes to a folder, and to temporary files.

        It is to be asked before anything is removed. None for an error of another kind. Programs
        whose messages are read here are to be started with LC_ALL=C.
        """
        if isinstance(error, WorkError):
            said = next((one for one in map(os.strerror, FULL) if one in error.what), None)
            return None if said is None else cls(folder, said)
        if error.errno not in FULL:
            return None
        if isinstance(error.filename, str):
            return cls(Path(error.filename).parent, os.strerror(error.errno))
        folders = (folder, Path(tempfile.gettempdir()))
        fullest = min(folders, key=lambda one: shutil.disk_usage(one).free)
        return cls(fullest, os.strerror(error.errno))

    def missing(self, needed: int, work: str) -> MissingError:
        """The error for work that may take so many bytes there, once what it wrote is removed."""
        free = shutil.disk_usage(self.folder).free
        return MissingError(
            f"{self.said} while {work}: it may take up to {needed:,} bytes ({human(needed)}), "
            f"{free:,} are free",
            where=str(self.folder),
            fix=f"free {human(max(needed - free, MIB))} on its file system, or use another one",
        )
