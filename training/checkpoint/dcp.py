"""Sharded checkpoints by torch's distributed checkpoint: every rank writes what it owns.

They contain the model, the optimizer and the random state of every rank; step, tokens and the
position in the data are in the manifest. The learning rate is a function of the step, so it needs
no state; the other settings of the optimizer are those that a run is started with.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from training import manifest
from training.checkpoint.in_memory import Copies, Held, Sources, Taken
from training.checkpoint.lease import RunLease
from training.checkpoint.memory_reader import MemoryReader
from training.errors import RequestError, TrainingError
from training.manifest import File, Manifest
from training.models.families import WITHOUT_EFFECT
from training.process_group import Group

STATE_BYTES = 12
"""Per parameter in a checkpoint: its value and AdamW's two moments, float32."""


def write(
    save_path: str,
    state: dict[str, Any],
    record: Manifest,
    group: Group,
    lease: RunLease,
    *,
    takes: int,
    keep: int = 0,
    every: int = 0,
    copies: Copies | None = None,
    warn: Callable[[str], None],
) -> Path:
    """Write a checkpoint, which appears under its name only when all of it is on disk.

    A collective call, on `group.control` alone. `takes` is about its size in bytes, for the error
    if there is no room. `copies` get what is read for the checksums. Checkpoints older than the
    newest `keep` are removed, as manifest.retain does; `warn` gets, on rank 0, a line for each that
    cannot be removed. Raises TrainingError on every rank if any could not write its part, or if
    rank 0's lease of the folder is lost; then nothing is left behind.
    """
    folder = manifest.temporary(save_path, record.step)
    final = folder.with_name(f"step_{record.step}_ckp")
    try:
        files = _write_files(folder, final, state, group, lease, takes, copies)

        def end() -> None:
            if group.rank == 0:
                lease.check()
                with _reporting(folder, takes):
                    manifest.publish(folder, replace(record, files=files))
                    for fault in manifest.retain(folder.parent, keep, every):
                        warn(fault)

        group.together(end)
    except TrainingError:
        if copies:
            copies.drop(final.name)
        if group.rank == 0 and not lease.lost:  # no rank, and no other run, is at work in it
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if copies:
        copies.keep(final.name)
    return final


def _write_files(
    folder: Path,
    final: Path,
    state: dict[str, Any],
    group: Group,
    lease: RunLease,
    takes: int,
    copies: Copies | None,
) -> dict[str, File]:
    """Write and sync what all ranks hold; each then reads its files back for the checksums."""

    def begin() -> None:
        if group.rank == 0:
            lease.check()
            with _reporting(folder, takes):
                manifest.make_anew(folder)

    def own_files() -> Taken:
        with _reporting(folder, takes):
            names = sorted(path.name for path in folder.iterdir())
            own = manifest.share(names, group.rank, group.world_size)
            if copies:
                return copies.take(folder, final, own, names)
            return Taken({name: File.of(folder / name) for name in own})

    group.together(begin)
    with _reporting(folder, takes):
        dcp.save(
            state,
            storage_writer=dcp.FileSystemWriter(folder, sync_files=True),
            process_group=group.control,
        )
    all_taken = group.gather(group.together(own_files))
    if copies:
        faults = {rank: one.fault for rank, one in enumerate(all_taken) if one.fault}
        copies.note_faults(final.name, faults)
    return {name: file for one in all_taken for name, file in one.files.items()}


@dataclass(frozen=True)
class FoundCheckpoint:
    """A sound checkpoint: each of its files, on disk or in memory, is what was written."""

    path: Path
    record: Manifest
    sources: Sources = field(default_factory=Sources)


def find(
    folders: list[str], group: Group, tell: Callable[[str], None], copies: Copies | None = None
) -> tuple[FoundCheckpoint | None, list[Path]]:
    """Find the newest sound checkpoint of the first folder that has any, and newer broken ones.

    A collective call: each rank reads its share of the files to the end, from memory if it has
    copies, and compares them with the manifest. Each broken checkpoint is reported and passed over.
    """
    broken: list[Path] = []
    for folder in folders:
        there = manifest.candidates(folder) if group.rank == 0 else []
        for _, path in group.broadcast(there):
            record, fault = group.broadcast(manifest.read(path) if group.rank == 0 else (None, ""))
            held: list[Held] = []
            if record is not None:
                mine = copies.look(path, record) if copies else Held()
                own = manifest.share(record.files, group.rank, group.world_size)
                # All ranks read files like .metadata, which not every one may have in memory.
                unread = [one for one in own if one not in mine.names or manifest.is_of_all(one)]
                looks = group.gather((mine, manifest.rotten(path, record, unread)))
                held = [one for one, _ in looks]
                fault = next((fault for _, fault in looks if fault), "")
            if record is not None and not fault:
                return FoundCheckpoint(path, record, Sources.of(held, group.rank)), broken
            tell(manifest.passed_over(path, fault))
            broken.append(path)
        if broken:  # what is lost here is not in another folder
            break
    return None, broken


@dataclass(frozen=True)
class Amount:
    """How many bytes all ranks have read."""

    in_memory: int = 0
    on_disk: int = 0


def load(
    found: FoundCheckpoint,
    state: dict[str, Any],
    group: Group,
    expected: dict[str, Any],
    say: Callable[[str], None],
) -> Amount:
    """Read a checkpoint into a state and this rank's random state, on any number of ranks.

    If the checkpoint was made without a GPU, a GPU's random state stays as it is, and `say` gets a
    line about that. Raises RequestError listing every field in which the model differs from
    `expected`, except those that have no effect on what weights mean.
    """
    path, record = found.path, found.record
    differing = [
        f"{name}: {record.model.get(name)!r} in the checkpoint, {expected.get(name)!r} asked for"
        for name in sorted((record.model.keys() | expected.keys()) - WITHOUT_EFFECT)
        if record.model.get(name) != expected.get(name)
    ]
    if differing:
        listed = "\n  - ".join(["", *differing])
        raise RequestError(
            f"{path} is of another model; fix: ask for its sizes, or give another folder:{listed}"
        )
    reader = MemoryReader(path, record, found.sources, group)

    def stored() -> Container[str]:
        with _reporting(path):
            names: Container[str] = reader.read_metadata().state_dict_metadata
        return names

    names = group.together(stored)
    own = _random(group.device)
    random = {name: own[name] for name in own if f"random.{_of(group)}.{name}" in names}
    state = dict(state)
    if random:  # a rank beyond those that saved has none
        state["random"] = {_of(group): random}
    with _reporting(path):
        dcp.load(state, storage_reader=reader, process_group=group.control)
    if "cpu" in random:
        torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"], group.device)
    elif random and "cuda" in own:
        say(f"{path} was made without a GPU: the random numbers of GPUs begin with the seed")
    amounts = group.gather((reader.in_memory, reader.on_disk))
    return Amount(sum(one for one, _ in amounts), sum(one for _, one in amounts))


def with_random(state: dict[str, Any], group: Group) -> dict[str, Any]:
    """Add this rank's random state to the state that it writes."""
    return {**state, "random": {_of(group): _random(group.device)}}


def _of(group: Group) -> str:
    return f"rank_{group.rank}"


def _random(device: torch.device) -> dict[str, Tensor]:
    """Return the random state of this rank: uint8 tensors."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


class _reporting:  # noqa: N801  (reads as a word: `with _reporting(folder)`)
    """Turns what goes wrong while a checkpoint is read into one line for the user.

    With `takes`, its size in bytes, the checkpoint is being written instead.
    """

    def __init__(self, folder: Path, takes: int = 0) -> None:
        self.folder, self.takes = folder, takes

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception | dcp.CheckpointException):
            return
        cause: BaseException = error
        if isinstance(error, dcp.CheckpointException) and error.failures:
            cause = next(iter(error.failures.values()))[0]
        verb = "read"
        if self.takes:
            # Torch turns a full disk into an error of its own that does not say so.
            free = shutil.disk_usage(self.folder.parent).free
            verb = (
                f"written ({free:,} bytes were free there when that failed, and a checkpoint takes "
                f"{self.takes:,})"
            )
        first_line = str(cause).strip().partition("\n")[0] or type(cause).__name__
        raise TrainingError(
            f"checkpoint {self.folder} could not be {verb}: {first_line}"
        ) from error
