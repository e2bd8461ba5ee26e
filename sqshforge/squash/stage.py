"""A copy of a squash file on a node's own disk, made once and found again by later jobs.

The copy is named by its content: the content key in the file's record, else the file's digest. It
has that name only when it is whole and its digest is right. The least recently used copies go
where a limit would be passed. Of several jobs on a node one copies and the others take what it
made: the lock is the kernel's, on the node's own file system.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqshforge.errors import MissingError, RequestError, WorkError
from sqshforge.host import files
from sqshforge.host.files import copy, exclusive, partial, publish, remove_leftovers, sync
from sqshforge.host.programs import Programs
from sqshforge.host.resources import processors, require_space
from sqshforge.host.terminal import Reporter, human
from sqshforge.run.start import require_sqsh
from sqshforge.squash import request

IN_USE = 900
"""Seconds after its last use in which a copy is not removed: a job may be about to start it."""


LONGEST_KEY = 128  # digits

LACKING = 1
"""Exit code of a look at a folder that lacks the copy."""


@dataclass(frozen=True)
class Identity:
    """What a squash file is: what its copies are called, and how they are known to be whole."""

    name: str
    size: int  # bytes
    digest: str

    @classmethod
    def of(cls, file: Path) -> Identity:
        """Identify a file by its record; one without is read. `RequestError` for no sqsh."""
        require_sqsh(file)
        size, facts = file.stat().st_size, request.read_record(file)
        if facts is not None and facts["size"] == size and isinstance(facts.get("digest"), str):
            return cls(_plain(facts["key"]), size, facts["digest"])
        found = files.digest(file, processors())
        return cls(_plain(found), size, found)


def place_of(identity: Identity, folder: Path) -> Path:
    """The path of a copy in a folder of copies."""
    return folder / f"{identity.name}.sqsh"


def is_there(identity: Identity, folder: Path) -> bool:
    """Whether a folder has the copy. What is under its name was whole when it got it."""
    place = place_of(identity, folder)
    return place.is_file() and place.stat().st_size == identity.size


def stage(
    file: Path, folder: Path, limit: int, reporter: Reporter, arrived: Path | None = None
) -> Path:
    """Copy a squash file into a folder unless it is there; the path of the copy.

    `limit` is how many bytes all copies may take. `arrived` is a copy that was brought to the same
    file system by other means, as sbcast: it is checked and moved. Raises `RequestError` for what
    is no squash file, `MissingError` where there is no room, and `WorkError` where what was copied
    is not what the record says.
    """
    try:
        identity = Identity.of(file)
        place = place_of(identity, folder)
        with _alone(folder, reporter):
            if is_there(identity, folder):
                reporter.say(f"{place}: there already")
            else:
                remove_leftovers(place)
                _make_room(folder, identity.size, limit, arrived)
                with reporter.track(f"copy {file.name} to {folder}"):
                    _copy(file, identity, place, arrived)
            os.utime(place)
    finally:
        if arrived is not None:
            arrived.unlink(missing_ok=True)
    return place


def look(
    file: Path, folder: Path, limit: int, reporter: Reporter, arrived: Path | None = None
) -> bool:
    """Whether a folder has the copy of a file; if it lacks it, room is made for one.

    What brings the copy to `arrived` next makes no room itself. Raises as `stage` does.
    """
    identity = Identity.of(file)
    with _alone(folder, reporter):
        if arrived is not None:
            arrived.unlink(missing_ok=True)  # of this job's start that was killed
        if is_there(identity, folder):
            return True
        remove_leftovers(place_of(identity, folder))
        _make_room(folder, identity.size, limit)
        require_space(folder, identity.size, "a copy on this node")
    return False


def stage_everywhere(
    file: Path,
    folder: Path,
    limit: str,
    programs: Programs,
    reporter: Reporter,
    *,
    tree: bool,
    job: Mapping[str, str] = os.environ,
) -> Path:
    """Stage a file on all nodes of the Slurm job that this process is in; the copies' path.

    With `tree` Slurm's sbcast brings it, which reads it once and hands it on from node to node;
    else each node copies it from where it lies. Nodes that have it from an earlier job are asked
    first. Raises as `stage` does, `RequestError` outside of a job.
    """
    number = job.get("SLURM_JOB_ID")
    if not number:
        raise RequestError("this is not a Slurm job", fix="leave --all-nodes out, or use sbatch")
    # -K0: a node that lacks the copy must not end the looks of others (KillOnBadExit=1).
    each = ("srun", "-K0", "--ntasks-per-node=1", sys.executable, "-m", "sqshforge", "stage")
    words: tuple[str, ...] = (str(file), str(folder), f"--limit={limit}")
    if tree:
        arrived = folder / f".{number}.sqsh"
        brought = (*words, f"--arrived={arrived}")
        looked = programs.attempt([*each, *brought, "--look"])
        if looked.code == LACKING:
            programs.capture(["sbcast", "--force", str(file), str(arrived)])
            words = brought
        elif looked.code != 0:
            raise WorkError(f"srun failed: {looked.err.strip()}", where=str(folder))
    programs.follow([*each, *words], reporter.say)
    return place_of(Identity.of(file), folder)


def _copy(file: Path, identity: Identity, place: Path, arrived: Path | None) -> None:
    written = partial(place)
    try:
        if arrived is None:
            require_space(place.parent, identity.size, "a copy on this node")
            copy(file, written, identity.size)
        else:
            arrived.rename(written)
        sync(written)
        if files.digest(written, processors()) != identity.digest:
            raise WorkError(
                "the copy does not match the record",
                where=f"{written.parent}, copied from {arrived or file}",
                fix=f"sqshforge verify {shlex.quote(str(file))} tells whether the file is whole",
            )
        written.chmod(0o644)
        facts = request.record_path(file)
        if facts.is_file():
            publish(facts.read_bytes(), request.record_path(place))
        written.rename(place)
        sync(place.parent)
    finally:
        written.unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path, reporter: Reporter) -> Iterator[None]:
    """Hold the lock of a folder of copies, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    waiting = f"waiting for another copy to {folder}"
    with exclusive(folder / ".stage.lock", waiting, reporter):
        yield


def _make_room(folder: Path, needed: int, limit: int, arrived: Path | None = None) -> None:
    """Remove the least recently used copies until one more fits into the limit.

    `arrived` is that one. What else was brought is a copy, as its job may have been killed.
    """
    found = (one for one in folder.glob("*.sqsh") if one != arrived)
    copies = sorted(found, key=lambda one: one.stat().st_mtime)
    taken = sum(one.stat().st_size for one in copies)
    now = time.time()
    for one in copies:
        if taken + needed <= limit:
            return
        facts = one.stat()
        if now - facts.st_mtime > IN_USE:
            request.record_path(one).unlink(missing_ok=True)
            one.unlink()
            taken -= facts.st_size
    if taken + needed > limit:
        raise MissingError(
            f"the copy does not fit: it takes {human(needed)}, others in use {human(taken)}, and "
            f"all may take {human(limit)}",
            where=str(folder),
            fix="let --limit (STAGE_LIMIT of a launcher) be more",
        )


def _plain(name: str) -> str:
    """The digits of a key or digest, without what it was made by."""
    plain = name.rpartition(":")[2]
    if not (plain.isascii() and plain.isalnum() and len(plain) <= LONGEST_KEY):
        raise RequestError(f"the record's key {name!r} is invalid", fix="pack the file anew")
    return plain
