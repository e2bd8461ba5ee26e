"""Reading a checkpoint from the nodes' memory, as far as its files are there.

A rank reads what its own node has in memory. If only other nodes have something, and it is little,
the ranks that have it send it: with state that is sharded over all ranks, these are the values that
ranks share, such as the optimizer's count of steps. If it is much, as with groups of ranks that
hold the same, it is read from disk, after the files there have been compared with the manifest.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.futures import Future

from training import manifest
from training.checkpoint.in_memory import Sources
from training.errors import TrainingError
from training.manifest import Manifest
from training.process_group import Group

SENT = 64 << 20
"""The most bytes of the memory of other nodes that ranks send each other."""


@dataclass(frozen=True)
class Piece:
    """A part of a file."""

    name: str
    offset: int
    length: int


class MemoryReader(FileSystemReader):
    """Torch's reader of the files in a folder, which reads from memory those that are there.

    `in_memory` and `on_disk` count the bytes that this rank has read. Reading is a collective call.
    """

    def __init__(self, path: Path, record: Manifest, sources: Sources, group: Group) -> None:
        super().__init__(path)
        self._disk, self._record, self._sources, self._group = path, record, sources, group
        self.in_memory = self.on_disk = 0

    def read_metadata(self, *given: Any, **named: Any) -> Any:
        """Read the metadata, which says where everything is."""
        self.path = self._sources.here.get(".metadata", self._disk)
        return super().read_metadata(*given, **named)

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        """Read what a plan asks for; all of it has been read when this returns."""
        near, far = dict(self._sources.here), set(self._sources.holders) - set(self._sources.here)
        asked = {piece for piece in map(self._piece, plan.items) if piece.name in far}
        sent: Path | None = None
        if self._group.any(bool(asked)):
            sent = self._exchange(asked)
        if sent is not None:
            near |= dict.fromkeys(far, sent)
        by_place: dict[Path, list[Any]] = defaultdict(list)
        for item in plan.items:
            piece = self._piece(item)
            by_place[near.get(piece.name, self._disk)].append(item)
            if piece.name in near:
                self.in_memory += piece.length
            else:
                self.on_disk += piece.length
        try:
            for self.path, items in by_place.items():
                super().read_data(replace(plan, items=items), planner)
        finally:
            if sent is not None:
                shutil.rmtree(sent, ignore_errors=True)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _piece(self, item: Any) -> Piece:
        found = self.storage_data[item.storage_index]
        return Piece(found.relative_path, found.offset, found.length)

    def _exchange(self, asked: set[Piece]) -> Path | None:
        """Get pieces from the ranks that have them, into a folder of files with holes.

        None: read them from disk, where their files were found to be sound. Raises TrainingError.
        """
        group = self._group
        all_asked = set().union(*group.gather(asked))
        sent: Path | None = None
        if sum(piece.length for piece in all_asked) <= SENT:
            mine = _read(self._sources.here, self._own(all_asked))
            got = {piece: data for part in group.gather(mine) for piece, data in part.items()}
            sent = _put(asked, got)
            if not group.any(bool(asked) and sent is None):
                return sent
        if sent is not None:
            shutil.rmtree(sent, ignore_errors=True)
        names = {piece.name for piece in self._own(all_asked)}
        fault = next(
            filter(None, group.gather(manifest.rotten(self._disk, self._record, names))), ""
        )
        if fault:
            raise TrainingError(f"{self._disk}: {fault}")
        return None

    def _own(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Select the pieces of files for which this rank answers."""
        return [one for one in pieces if self._sources.holders[one.name] == self._group.rank]


def _read(places: Any, pieces: Iterable[Piece]) -> dict[Piece, bytes]:
    """Read pieces of files in memory; omit what cannot be read."""
    found = {}
    for one in pieces:
        try:
            with (places[one.name] / one.name).open("rb") as file:
                file.seek(one.offset)
                found[one] = file.read(one.length)
        except OSError:
            continue
    return found


def _put(asked: Iterable[Piece], got: dict[Piece, bytes]) -> Path | None:
    """Write pieces at their offsets into files of a new folder; None if that fails."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="checkpoint-pieces-"))
    except OSError:
        return None
    try:
        for one in asked:
            with (folder / one.name).open("r+b" if (folder / one.name).exists() else "xb") as file:
                file.seek(one.offset)
                file.write(got[one])
    except (OSError, KeyError):
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return folder
