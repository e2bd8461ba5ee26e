"""A copy of a squash file on a node's own disk, made once and reused by later jobs.

The copy is named by the file's digest, which the record holds. The record's content key would not
do: for a folder (`rootfs:`) it does not depend on the folder's content. A copy gets its name only
when it is complete and its digest is right. The least recently used copies are removed to stay
within a limit. Of several jobs on a node, one copies and the others use its copy: they share a
kernel lock on the node's own file system. Each user has a folder of their own in the folder of
copies: an existing copy is started without being read, so no other user may have made it.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqshforge.errors import MissingError, RequestError, WorkError
from sqshforge.host import files
from sqshforge.host.files import copy, partial, publish, remove_leftovers, sync
from sqshforge.host.locks import exclusive
from sqshforge.host.programs import Programs
from sqshforge.host.resources import processors, require_space
from sqshforge.host.terminal import Reporter, human
from sqshforge.run.start import require_sqsh
from sqshforge.squash import request

IN_USE = 900
"""Seconds for which a copy is kept after its last use: a job may be about to start it."""

DIGITS = "[0-9a-f]{64}"
COPY = re.compile(rf"({DIGITS}|\.[0-9]+)\.sqsh")
"""Names of copies, and of files that sbcast brings for a job; other files are left alone."""

OWN_FOLDER = "name a folder of your own, or have root make one with the mode 1777"

LACKING = 1
"""The exit code of `stage --look` if the folder lacks the copy."""


@dataclass(frozen=True)
class Identity:
    """The identity of a squash file: it names its copies and tells whether they are whole."""

    size: int  # bytes
    digest: str

    @property
    def name(self) -> str:
        """The digits of the digest, without the name of its algorithm."""
        return self.digest.rpartition(":")[2]

    @classmethod
    def of(cls, file: Path, digest: str | None = None) -> Identity:
        """Identify a file by its record, or by its digest if it has no record.

        The file is read unless `digest` gives its digest or its times are those in the record.
        Raises `RequestError` if it is not a squash file, `WorkError` if the record is of another
        file.
        """
        require_sqsh(file)
        found, facts = file.stat(), request.read_record(file)
        recorded = facts.get("digest") if facts is not None else None
        if facts is None or not isinstance(recorded, str):
            digest = digest or files.digest(file, processors())
            return cls(found.st_size, _valid(digest))
        is_same = found.st_size == facts["size"]
        if is_same and (digest or not request.is_untouched(found, facts)):
            # Squash files are padded: after a small edit the size is often the same.
            is_same = (digest or files.digest(file, processors())) == recorded
        if not is_same:
            beside = request.record_path(file)
            raise WorkError(
                "the file does not match the record beside it",
                where=f"{file}, {beside.name}",
                fix=f"copy {beside.name} with the file, or remove it; sqshforge verify "
                f"{shlex.quote(str(file))} tells whether the file is whole",
            )
        return cls(found.st_size, _valid(recorded))


def own_folder(folder: Path) -> Path:
    """The user's own folder in a folder of copies."""
    return folder / str(os.geteuid())


def place_of(identity: Identity, folder: Path) -> Path:
    """The path of this user's copy in a folder of copies."""
    return own_folder(folder) / f"{identity.name}.sqsh"


def is_there(identity: Identity, folder: Path) -> bool:
    """Whether this user has the copy. A file gets the name of a copy only once it is whole."""
    place = place_of(identity, folder)
    return place.is_file() and place.stat().st_size == identity.size


def stage(
    file: Path,
    folder: Path,
    limit: int,
    reporter: Reporter,
    arrived: Path | None = None,
    digest: str | None = None,
) -> Path:
    """Copy a squash file into a folder unless it is there already; return the path of the copy.

    `limit` is how many bytes all copies of this user may take. `arrived` is a copy that was brought
    to the same file system by other means, such as sbcast: it is checked and moved. `digest` is the
    file's digest if it is known. Raises `RequestError` if the file is not a squash file or the
    folder is not safe for this user's copies, `MissingError` if there is no room, and `WorkError`
    if the file or the copy does not match the record.
    """
    try:
        identity = Identity.of(file, digest)
        place = place_of(identity, folder)
        with _alone(folder, reporter):
            if is_there(identity, folder):
                reporter.say(f"{place}: there already")
            else:
                remove_leftovers(place, ".json")
                _make_room(place.parent, identity.size, limit, arrived)
                with reporter.track(f"copy {file.name} to {folder}"):
                    _copy(file, identity, place, arrived)
            os.utime(place)
    finally:
        if arrived is not None:
            arrived.unlink(missing_ok=True)
    return place


def look(
    file: Path,
    folder: Path,
    limit: int,
    reporter: Reporter,
    arrived: Path | None = None,
    digest: str | None = None,
) -> bool:
    """Return whether a folder has the copy of a file; if it has not, make room for one.

    The program that brings the copy to `arrived` next makes no room itself. Raises as `stage` does.
    """
    identity = Identity.of(file, digest)
    place = place_of(identity, folder)
    with _alone(folder, reporter):
        if arrived is not None:
            arrived.unlink(missing_ok=True)  # left by a start of this job that was killed
        if is_there(identity, folder):
            return True
        remove_leftovers(place, ".json")
        _make_room(place.parent, identity.size, limit)
        require_space(place.parent, identity.size, "a copy on this node")
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
    """Stage a file on all nodes of this process's Slurm job; return the path of the copies.

    With `tree`, Slurm's sbcast brings the file if any node lacks it: it reads the file once and
    passes it on from node to node. Otherwise each node copies the file itself. If the file has to
    be read for its digest, it is read here, once for all nodes. Raises as `stage` does, and
    `RequestError` outside of a job.
    """
    number = job.get("SLURM_JOB_ID")
    if not number:
        raise RequestError("this is not a Slurm job", fix="leave --all-nodes out, or use sbatch")
    identity = Identity.of(file)
    # A node that is done or lacks the copy must not end the others' (WaitTime, KillOnBadExit=1).
    each = (
        "srun",
        "-K0",
        "--wait=0",
        "--ntasks-per-node=1",
        sys.executable,
        "-m",
        "sqshforge",
        "stage",
    )
    words: tuple[str, ...] = (str(file), str(folder), f"--limit={limit}")
    words += (f"--digest={identity.digest}",)
    if tree:
        arrived = own_folder(folder) / f".{number}.sqsh"
        brought = (*words, f"--arrived={arrived}")
        looked = programs.attempt([*each, *brought, "--look"])
        if looked.code == LACKING:
            programs.capture(["sbcast", "--force", str(file), str(arrived)])
            words = brought
        elif looked.code != 0:
            raise WorkError(f"srun failed: {looked.err.strip()}", where=str(folder))
    programs.follow([*each, *words], reporter.say)
    return place_of(identity, folder)


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
    """Hold the lock of this user's folder of copies, which is made if it is missing."""
    own = own_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own.mkdir(mode=0o700, exist_ok=True)
        above, facts = folder.stat(), own.lstat()
    except OSError as error:
        raise RequestError(
            f"there can be no folder for this user's copies: {error.strerror}",
            where=str(own),
            fix=OWN_FOLDER,
        ) from None
    _require_safe(folder, above, of_root=True)
    _require_safe(own, facts)
    waiting = f"waiting for another copy to {folder}"
    with exclusive(own / ".stage.lock", waiting, reporter):
        yield


def _require_safe(folder: Path, facts: os.stat_result, *, of_root: bool = False) -> None:
    """Raise `RequestError` for a folder in which another user could replace a file.

    With `of_root`, the folder may be root's, and writable by all users if it has the sticky bit.
    """
    owners = {os.geteuid(), 0} if of_root else {os.geteuid()}
    is_open = facts.st_mode & stat.S_IWOTH and not (of_root and facts.st_mode & stat.S_ISVTX)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid not in owners or is_open:
        raise RequestError(
            "other users could replace the copies there, which are started unread: it belongs to "
            f"uid {facts.st_uid} and has the mode {stat.S_IMODE(facts.st_mode):04o}",
            where=str(folder),
            fix=OWN_FOLDER,
        )


def _make_room(folder: Path, needed: int, limit: int, arrived: Path | None = None) -> None:
    """Remove the least recently used copies until one more, of `needed` bytes, fits the limit.

    `arrived` is that one. Other files that sbcast brought count as copies: their jobs may have been
    killed.
    """
    found = (one for one in folder.iterdir() if COPY.fullmatch(one.name) and one != arrived)
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


def _valid(digest: str) -> str:
    """Return a digest by which a copy can be named; raises `RequestError` for an invalid one."""
    if not re.fullmatch(DIGITS, digest.rpartition(":")[2]):
        raise RequestError(f"the digest {digest!r} is invalid", fix="pack the file anew")
    return digest
