"""How many processors, how much memory and how much disk space this process may use.

A cgroup (a container's, a Slurm job's) or the job's own request may allow less than the machine
has. The files that are read lie below `root`, which is / except in tests.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sqshforge.errors import MissingError, WorkError
from sqshforge.host.cgroups import file_text, groups, memory_limits, positive
from sqshforge.host.terminal import human

MIB = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)
# MiB: more than MOST does not make mksquashfs faster, less than LEAST makes it slower (it accepts
# 16 or more). The value does not change the bytes.
MOST, LEAST = 256, 64


def processors(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> int:
    """The number of processors that this process may use, at least one.

    A quota of 1.5 counts as one: a second thread would be stopped half of the time.
    """
    quotas = (int(quota) for quota in _processor_quotas(root))
    job = _job_processors(environment)
    allowed = len(os.sched_getaffinity(0))
    return max(1, min([allowed, *quotas, *([job] if job is not None else [])]))


def memory(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> int | None:
    """The bytes of memory that this process may use; None if unknown."""
    limits = [limit for group in groups(root, "memory") for limit in memory_limits(group)]
    limits += _job_memory(root, environment)
    total = re.search(r"^MemTotal:\s+(\d+) kB$", file_text(root / "proc/meminfo"), re.MULTILINE)
    if total is not None:
        limits.append(int(total[1]) * 1024)
    return min(limits, default=None)


def mksquashfs_memory(limit: int | None) -> str:
    """The value for mksquashfs's -mem: a quarter of the limit, within bounds.

    The rest is for its needs beyond the buffers, and for the files that it reads.
    """
    quarter = MOST if limit is None else limit // 4 // MIB
    return f"{max(LEAST, min(MOST, quarter))}M"


def _processor_quotas(root: Path) -> Iterator[float]:
    for group in groups(root, "cpu"):
        if group.version == 2:
            quota, _, period = file_text(group.folder / "cpu.max").partition(" ")
        else:
            quota = file_text(group.folder / "cpu.cfs_quota_us")
            period = file_text(group.folder / "cpu.cfs_period_us")
        runtime, of = positive(quota), positive(period)
        if runtime is not None and of is not None:
            yield runtime / of


def _job_processors(environment: Mapping[str, str]) -> int | None:
    """The processors that a Slurm job asked for, which count even if Slurm does not confine it."""
    asked = positive(environment.get("SLURM_CPUS_PER_TASK", ""))
    return asked or positive(environment.get("SLURM_CPUS_ON_NODE", ""))


def _job_memory(root: Path, environment: Mapping[str, str]) -> Iterator[int]:
    node = positive(environment.get("SLURM_MEM_PER_NODE", ""))
    if node is not None:
        yield node * MIB
    each = positive(environment.get("SLURM_MEM_PER_CPU", ""))
    if each is not None:
        yield each * MIB * (_job_processors(environment) or processors(root, environment))


def require_space(folder: Path, needed: int, work: str) -> None:
    """Raise `MissingError` if a folder's file system has fewer than `needed` bytes free."""
    existing = _existing(folder)
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise MissingError(
            f"the disk is too small for {work}: it needs {needed:,} bytes ({human(needed)}), "
            f"{free:,} are free, {needed - free:,} are missing",
            where=str(folder),
            fix=f"free {human(needed - free)} on the file system of {existing}",
        )


def _existing(folder: Path) -> Path:
    """A folder, or its nearest parent that exists."""
    return next(one for one in (folder, *folder.absolute().parents) if one.exists())


@dataclass(frozen=True)
class FullDisk:
    """A folder whose file system is full, or this user's quota is; `said` is the error's text."""

    folder: Path
    said: str

    @classmethod
    def of(cls, error: OSError | WorkError, folder: Path) -> FullDisk | None:
        """The full disk behind an error of work that writes to a folder and to temporary files.

        None for an error of another kind. Call it before anything is removed. The messages of
        programs are read here, so start them with LC_ALL=C.
        """
        if isinstance(error, WorkError):
            what = error.what.lower()  # programs in Go write it in lower case
            said = next((one for one in map(os.strerror, FULL) if one.lower() in what), None)
            return None if said is None else cls(folder, said)
        if error.errno not in FULL:
            return None
        if isinstance(error.filename, (str, bytes)):
            return cls(Path(os.fsdecode(error.filename)).parent, os.strerror(error.errno))
        folders = (folder, Path(tempfile.gettempdir()))
        fullest = min(folders, key=lambda one: shutil.disk_usage(one).free)
        return cls(fullest, os.strerror(error.errno))

    def missing(self, needed: int, work: str) -> MissingError:
        """The error for work that may need `needed` bytes there; call it after the clean-up."""
        existing = _existing(self.folder)
        free = shutil.disk_usage(existing).free
        return MissingError(
            f"{self.said} while {work}: it may take up to {needed:,} bytes ({human(needed)}), "
            f"{free:,} are free",
            where=str(existing),
            fix=f"free {human(max(needed - free, MIB))} on its file system, or use another one",
        )
