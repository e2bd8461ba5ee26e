"""Copies of the newest checkpoint in the nodes' memory, for ranks that are restarted in place.

Each rank keeps the files that it wrote when it reads them back for their checksums. Layout, in the
folder that training.checkpoint.memory_folder makes on each node:

    rank_<R>/step_<N>_ckp/{note.json, __<R>_0.distcp, ...}

The first rank of a node also keeps .metadata, which all of them read. The note is written last. The
checkpoint on disk is what counts: a copy is used only for the very checkpoint that is to be loaded,
if each file has the size and the checksum in its manifest. Nothing that goes wrong with a copy
fails a save.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from training.checkpoint.free_memory import free_in
from training.manifest import File, Manifest, is_of_all, share, writer
from training.process_group import Group

NOTE = "note.json"


@dataclass(frozen=True)
class Held:
    """What this rank keeps of a checkpoint, compared with its manifest; or why it keeps nothing."""

    folder: str = ""
    node: str = ""  # the folder of all ranks of the node; no other node's has this name
    names: tuple[str, ...] = ()
    why_not: str = ""


@dataclass(frozen=True)
class Sources:
    """Where this rank reads the files of a checkpoint, and who has those that it cannot read."""

    here: Mapping[str, Path] = field(default_factory=dict)  # file -> the folder in memory
    holders: Mapping[str, int] = field(default_factory=dict)  # file -> a rank that has it in memory
    lacking: Mapping[int, str] = field(default_factory=dict)  # rank -> why it has no copy

    @classmethod
    def of(cls, held: Sequence[Held], rank: int) -> Sources:
        """Combine what all ranks keep, for one of them."""
        here: dict[str, Path] = {}
        holders: dict[str, int] = {}
        node = held[rank].node
        for number, one in enumerate(held):
            for name in one.names:
                holders.setdefault(name, number)
                if one.node == node:
                    here[name] = Path(one.folder)
        lacking = {number: one.why_not for number, one in enumerate(held) if one.why_not}
        return cls(here, holders, lacking)


class Copies:
    """The copies of this rank; its methods are not collective calls."""

    def __init__(self, folder: Path, job: str, group: Group, most: int) -> None:
        """Use the node's `folder`. most: bytes that two copies of all its ranks may take."""
        self._node, self._job, self._most = folder, job, most
        self._own = folder / f"rank_{group.rank}"
        self._rank, self._ranks, self._local = group.rank, group.world_size, group.local_world_size
        self._failed, self.warning = False, ""

    def take(self, folder: Path, final: Path, own: Sequence[str], all_: Sequence[str]) -> Taken:
        """Read this rank's files for their checksums, and keep a copy of them.

        folder: where they are; final: what the folder will be called; own: their names; all_: the
        names of all files. Raises OSError if a file cannot be read.
        """
        place = self._own / final.name
        copy = _Copy(place, self._obstacle(folder, all_))
        files = {name: copy.take(folder / name) for name in own}
        if self._is_first_of_node:
            for name in (one for one in all_ if is_of_all(one) and one not in files):
                with suppress(OSError):  # then it is read from disk later
                    copy.extra[name] = copy.take(folder / name)
        note = _Note(
            job=self._job,
            checkpoint=str(final.absolute()),
            ranks=self._ranks,
            files={**files, **copy.extra},
        )
        return Taken(files, copy.finish(note))

    def note_faults(self, name: str, faults: Mapping[int, str]) -> None:
        """Prepare a warning of the faults of all ranks' copies, once while faults go on."""
        before, self._failed = self._failed, bool(faults)
        if faults and not before:
            which = ", ".join(map(str, list(faults)[:8])) + (", ..." if len(faults) > 8 else "")
            self.warning = (
                f"checkpoint_in_memory: no copy of {name} is kept by rank {which} in "
                f"{self._node}: {next(iter(faults.values()))}; a restart reads it from disk"
            )

    def take_warning(self) -> str:
        """Return the warning that has not been logged yet; empty if there is none."""
        warning, self.warning = self.warning, ""
        return warning

    def keep(self, name: str = "") -> None:
        """Remove all copies except that of the checkpoint of this name; without a name, all.

        The first rank of a node does so also for ranks that were on it before a restart in place
        renumbered the nodes: while that checkpoint is the newest, the next restart may bring them
        back.
        """
        before = self._ranks_before()
        for rank in (self._own, *before):
            with suppress(OSError):
                for one in rank.iterdir():
                    if one.name != name:
                        shutil.rmtree(one, ignore_errors=True)
        for rank in before:
            with suppress(OSError):  # it still has a copy
                rank.rmdir()

    def drop(self, name: str) -> None:
        """Remove the copy of a checkpoint that did not become complete."""
        shutil.rmtree(self._own / name, ignore_errors=True)

    def look(self, path: Path, record: Manifest) -> Held:
        """Read this rank's copy of a checkpoint and compare it with the manifest."""
        own = share(record.files, self._rank, self._ranks)
        if self._is_first_of_node:
            own += [name for name in record.files if is_of_all(name) and name not in own]
        place = self._own / path.name
        try:
            note = _Note.read(place / NOTE)
        except FileNotFoundError:
            return Held(node=str(self._node), why_not=self._missing(path.name))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            return Held(node=str(self._node), why_not=f"{place / NOTE} cannot be read: {error}")
        why_not = self._other_run(note, path, record)
        found = []
        for name in () if why_not else own:
            if fault := _fault(place / name, note.files.get(name), record.files[name]):
                why_not = why_not or fault
            else:
                found.append(name)
        return Held(str(place), str(self._node), tuple(found), why_not)

    @property
    def _is_first_of_node(self) -> bool:
        return self._rank == self._of_node[0]

    @property
    def _of_node(self) -> range:
        """The ranks of this node."""
        first = self._rank - self._rank % self._local
        return range(first, first + self._local)

    def _ranks_before(self) -> list[Path]:
        """List, for the first rank of a node, the folders of ranks that are no longer on it."""
        now = {f"rank_{rank}" for rank in self._of_node}
        there = self._node.glob("rank_*") if self._is_first_of_node else ()
        return [one for one in there if one.name not in now]

    def _missing(self, name: str) -> str:
        """Say that there is no copy of a checkpoint, and which copies there are."""
        there = []
        with suppress(OSError):
            there = sorted(one.name for one in self._own.iterdir())
        if name in there:
            return f"the copy of {name} was not finished"
        return f"no copy of {name}" + (f", only of {', '.join(there)}" if there else "")

    def _other_run(self, note: _Note, path: Path, record: Manifest) -> str:
        """Say why a copy is not of this checkpoint; empty if it is."""
        if note.job != self._job:
            return f"the copy is of job {note.job}"
        if note.checkpoint != str(path.absolute()):
            return f"the copy is of {note.checkpoint}"
        if not note.ranks == record.world_size == self._ranks:
            return f"the copy is of {note.ranks} ranks, the checkpoint of {record.world_size}"
        return ""

    def _obstacle(self, folder: Path, all_: Sequence[str]) -> str:
        """Say why there is no room for a copy of what this node has written; empty if there is."""
        node = self._of_node
        try:
            names = [one for one in all_ if writer(one) % self._ranks in node or is_of_all(one)]
            takes = sum((folder / name).stat().st_size for name in names)
            free = free_in(self._node)
        except OSError as error:
            return str(error.strerror)
        if 2 * takes > self._most:
            return f"{size(2 * takes)} for two copies are more than the {size(self._most)} allowed"
        # As much again stays free for the run itself.
        if 2 * takes > free:
            return f"a copy takes {size(takes)}, and {size(free)} of memory are free"
        return ""


@dataclass(frozen=True)
class Taken:
    """The files that this rank has read, and why they have no copy (empty: they have)."""

    files: dict[str, File]
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class _Note:
    """Identifies the checkpoint that a copy is of."""

    job: str  # with the number of its start
    checkpoint: str
    ranks: int
    files: Mapping[str, File]

    @classmethod
    def read(cls, path: Path) -> _Note:
        record = json.loads(path.read_text())
        return cls(**record | {"files": {name: File(**f) for name, f in record["files"].items()}})


class _Copy:
    """A copy in the making; after the first fault nothing more is written."""

    def __init__(self, place: Path, fault: str) -> None:
        self._place, self._fault = place, fault
        self.extra: dict[str, File] = {}
        if not fault:
            self._do(self._begin)

    def take(self, source: Path) -> File:
        """Read a file for its checksum, and copy it. Raises OSError if it cannot be read."""
        opened: list[int] = []
        self._do(lambda: opened.append(self._open(source.name)))
        try:
            return File.of(source, lambda piece: self._do(lambda: _write(opened[0], piece)))
        finally:
            for file in opened:
                os.close(file)

    def finish(self, note: _Note) -> str:
        """Write the note; after a fault, remove everything and return the fault instead."""
        text = json.dumps(asdict(note)).encode()
        opened: list[int] = []
        self._do(lambda: opened.append(self._open(f"{NOTE}.new")))
        self._do(lambda: _write(opened[0], text))
        for file in opened:
            os.close(file)
        self._do(lambda: (self._place / f"{NOTE}.new").rename(self._place / NOTE))
        if self._fault:
            shutil.rmtree(self._place, ignore_errors=True)
        return self._fault

    def _begin(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)
        # This never makes the node's folder: without the agent nobody would remove it.
        self._place.parent.mkdir(mode=0o700, exist_ok=True)
        self._place.mkdir(mode=0o700)

    def _open(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(self._place / name, flags, 0o600)

    def _do(self, what: Any) -> None:
        if not self._fault:
            try:
                what()
            except OSError as error:
                self._fault = str(error.strerror)


def _write(file: int, data: bytes) -> None:
    """Write all data. Not through a mapping, in which a full tmpfs kills the process (SIGBUS)."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def _fault(copy: Path, noted: File | None, written: File) -> str:
    """Say what is wrong with the copy of a file; empty if nothing is."""
    if written.crc32 is None:
        return f"the manifest has no checksum of {copy.name}"
    if noted is None:
        return f"no copy of {copy.name}"
    if noted != written:
        return f"{copy.name} was written again since"
    try:
        found = File.of(copy)
    except OSError as error:
        return f"the copy of {copy.name} cannot be read: {error.strerror}"
    return "" if found == written else f"the copy of {copy.name} has another checksum"


def size(count: int) -> str:
    """Format a number of bytes."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
