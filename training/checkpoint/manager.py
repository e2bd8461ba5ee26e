"""Saving a run, and resuming it from a checkpoint.

If possible, training goes on while a checkpoint is written. Of the settings that a checkpoint was
made with, some must be the same when it is resumed; others may change, which the log reports.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from training import manifest
from training.checkpoint import dcp
from training.checkpoint.dcp import FoundCheckpoint
from training.checkpoint.in_memory import Copies, size
from training.checkpoint.lease import RunLease
from training.checkpoint.memory_choice import is_restarted
from training.checkpoint.mirror import Mirror
from training.config.config import Config, RunConfig
from training.data.base import DataFeed
from training.data.loader import Prefetcher
from training.errors import RequestError, TrainingError, reading
from training.manifest import Manifest
from training.models.families import WITHOUT_EFFECT, completed, identity
from training.parallel.backend import Backend
from training.parallel.memory import compute_dtype
from training.process_group import Group


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    step: int
    seconds: float  # until it was complete
    waited: float  # how much of that training stood still


@dataclass(frozen=True)
class _UnderWay:
    """A checkpoint that is being written in the background."""

    step: int
    result: Future[tuple[Path, float]]  # its folder, and when it was complete
    since: float
    waited: float  # seconds for which training has stood still so far


class Saver:
    """Writes the checkpoints of a run, one at a time.

    In the background a thread writes a copy that `save` makes in the host's memory; its collective
    calls have a process group of their own, so they never mix with those of the training loop.
    `end` waits for it and reports its outcome, and so does leaving the context. Making a Saver is a
    collective call, and so are its methods, except `writing` and `completed`. They raise
    TrainingError on every rank if a checkpoint cannot be written.
    """

    def __init__(
        self,
        config: Config,
        backend: Backend,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: Group,
        say: Callable[[str], None],
        lease: RunLease,
        takes: int,
        copies: Copies | None = None,
    ) -> None:
        self.run, self.backend, self.group, self.say = config.run, backend, group, say
        self.lease, self.takes = lease, takes  # bytes of a checkpoint
        self.model, self.optimizer, self.copies = model, optimizer, copies
        self.mirror = Mirror(config.run) if config.run.mirror_url else None
        self._under_way: _UnderWay | None = None
        self._completed: list[Saved] = []
        self._warnings: list[str] = []
        self._copy_to_host: Callable[[Any], Any] | None = None
        if config.run.async_checkpoint:
            self._copy_to_host, why = backend.copier(config, group.device)
            if self._copy_to_host is None:
                say(f"checkpoints are written while training waits: {why}")
        if self._copy_to_host:
            control = dist.new_group(backend="gloo", timeout=group.timeout)
            self._background = replace(group, control=control)
            self._thread = ThreadPoolExecutor(1, "checkpoint", _use, (group.device,))

    @property
    def writing(self) -> bool:
        """Whether this rank's part of a checkpoint is being written (no collective call)."""
        return self._under_way is not None and not self._under_way.result.done()

    def save(self, record: Manifest) -> None:
        """Save the model and the optimizer as they are now, with the manifest `record`."""
        self.end()
        since = time.perf_counter()
        state = dcp.with_random(self.backend.state(self.model, self.optimizer), self.group)
        if self._copy_to_host is None:
            path, complete = self._write(state, record, self.group)
            self._tell(path, Saved(record.step, complete - since, complete - since))
            return
        copy = self.group.together(lambda: self._copy(state))
        result = self._thread.submit(self._write, copy, record, self._background)
        self._under_way = _UnderWay(record.step, result, since, waited=time.perf_counter() - since)

    def end(self) -> None:
        """Wait until the checkpoint under way, if any, is complete, and report it."""
        if self._under_way is None:
            return
        ending, self._under_way = self._under_way, None
        since = time.perf_counter()
        path, complete = ending.result.result()
        waited = ending.waited + time.perf_counter() - since
        self._tell(path, Saved(ending.step, complete - ending.since, waited))

    def completed(self) -> list[Saved]:
        """Return the checkpoints completed since the last call (no collective call)."""
        completed, self._completed = self._completed, []
        return completed

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.end()
            return
        try:  # what was sound before the error is worth keeping
            self.end()
        except Exception as failure:  # the error that ends the run is the one to raise
            self.say(f"WARNING: {failure}")

    def _copy(self, state: dict[str, Any]) -> Any:
        assert self._copy_to_host is not None
        try:
            return self._copy_to_host(state)
        except (RuntimeError, MemoryError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise TrainingError(
                "a checkpoint could not be copied to the host's memory, which takes as many bytes "
                f"as it has: {first_line}; fix: set async_checkpoint=False, which writes without "
                "a copy"
            ) from error

    def _write(self, state: dict[str, Any], record: Manifest, group: Group) -> tuple[Path, float]:
        run = self.run
        path = dcp.write(
            run.save_ckpt_path,
            state,
            record,
            group,
            self.lease,
            takes=self.takes,
            keep=run.keep_checkpoints,
            every=run.keep_every,
            copies=self.copies,
            warn=self._warnings.append,
        )
        if self.mirror:
            self.mirror.push(path, group, self._warnings.append)
        return path, time.perf_counter()

    def _tell(self, path: Path, one: Saved) -> None:
        self._completed.append(one)
        self.say(
            f"saved {path} in {one.seconds:.2f} s, for {one.waited:.2f} s of which training waited"
        )
        if self.copies and (warning := self.copies.take_warning()):
            self._warnings.append(warning)
        for warning in self._warnings:
            self.say(f"WARNING: {warning}")
        self._warnings.clear()


def _use(device: torch.device) -> None:
    """Make a new thread use this rank's GPU; it would otherwise use the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@dataclass(frozen=True)
class Resumed:
    """What a run resumes from, and what reading that took."""

    step: int = 0
    tokens_seen: int = 0
    seconds: float = 0.0
    in_memory: float | None = None  # share of the bytes that came from memory; None: none were read


def require_start(run: RunConfig) -> None:
    """Refuse a load_ckpt_path that has no checkpoint if the run has none of its own either.

    It may be the run's own folder, as in published command lines. Raises RequestError.
    """
    load, own = run.load_ckpt_path, run.save_ckpt_path
    if not load or Path(load).resolve() == Path(own).resolve():
        return
    with reading(Path(load), "load_ckpt_path: "):
        found = any(manifest.candidates(folder) for folder in run.checkpoint_folders)
    if not found:
        raise RequestError(
            f"load_ckpt_path: {load} has no checkpoint; fix: name a run's folder or one of its "
            "step_N_ckp folders, or leave it out to begin at step 0"
        )


def resume(
    config: Config,
    group: Group,
    backend: Backend,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Prefetcher,
    say: Callable[[str], None],
    copies: Copies | None = None,
) -> Resumed:
    """Load the newest sound checkpoint, if any, from the nodes' memory as far as it is there.

    The save folder comes first: what this run wrote is newer than what it started from. Its broken
    checkpoints that were passed over are set aside, and copies of others removed. A collective
    call. Raises RequestError for a checkpoint of another model, of more steps than asked for, or of
    as many if it is another run's, and TrainingError if there are checkpoints but none is sound.
    """
    run, since = config.run, time.perf_counter()
    found, broken = dcp.find(run.checkpoint_folders, group, say, copies)
    # The copy of a broken one at the URL may be sound.
    if broken and run.mirror_url and Mirror(run).pull(group, say, broken):
        found, broken = dcp.find(run.checkpoint_folders, group, say, copies)
    if found is None and broken:
        folder = next(one for one in run.checkpoint_folders if broken[0].is_relative_to(one))
        raise TrainingError(
            f"none of the {len(broken)} checkpoints of {folder} is sound; fix: move them away to "
            "begin without them"
        )
    if found is None:
        say("no checkpoint found: starting at step 0")
        if copies:
            copies.keep()
        return Resumed()
    path, record = found.path, found.record
    if record.step > run.num_steps:
        raise RequestError(
            f"num_steps: {run.num_steps} is less than the {record.step} steps of {path}; fix: give "
            "more steps, or another folder"
        )
    if record.step == run.num_steps and not path.is_relative_to(run.save_ckpt_path):
        raise RequestError(
            f"num_steps: {run.num_steps} are those of the whole run, and {path} has taken them; "
            "fix: give more"
        )
    found = replace(found, record=replace(record, model=completed(record.model)))
    loaded = _load(found, config, group, backend.state(model, optimizer), say)
    if loaded is None:
        if copies:
            copies.keep()
        return resume(config, group, backend, model, optimizer, data, say)
    state, amount = loaded
    backend.restore(model, optimizer, state)
    seconds = time.perf_counter() - since
    say(f"resumed from {path} at step {record.step}")
    say(
        f"read in {seconds:.2f} s: {size(amount.in_memory)} from the nodes' memory, "
        f"{size(amount.on_disk)} from disk"
    )
    if run.mirror_url:
        Mirror(run).push_missing(path, group, say)
    if copies:
        copies.keep(path.name)
        if found.sources.lacking and is_restarted():
            say(f"WARNING: {_missing_copies(found, group)}")
    if group.rank == 0:  # else they would count among the newest, which are kept
        for one in broken:
            manifest.set_aside(one, run.save_ckpt_path)
    before = record.settings | _changeable_sizes(record.model)
    now = changeable_settings(config, data.feed, group.device)
    for change in _changes(before, now | _changeable_sizes(model_identity(config))):
        say(f"WARNING: {change}; the new value is used")
    if record.world_size != group.world_size:
        say(f"it was saved by {record.world_size} ranks, now {group.world_size}")
    warning = data.resume(record.data)
    if warning:
        say(f"WARNING: {warning}")
    share = amount.in_memory / max(1, amount.in_memory + amount.on_disk)
    return Resumed(record.step, record.tokens_seen, seconds, share)


def _load(
    found: FoundCheckpoint,
    config: Config,
    group: Group,
    state: dict[str, Any],
    say: Callable[[str], None],
) -> tuple[dict[str, Any], dcp.Amount] | None:
    """Read a checkpoint into a state; None if memory fails, and disks are to be read."""
    try:
        return state, dcp.load(found, state, group, model_identity(config), say)
    except TrainingError as error:
        if isinstance(error, RequestError) or not found.sources.holders:
            raise
        say(f"WARNING: checkpoint_in_memory: {error}; it is read from disk instead")
        return None


def _missing_copies(found: FoundCheckpoint, group: Group) -> str:
    """Say why not all of a checkpoint was in memory."""
    lacking = found.sources.lacking
    rank, why = next(iter(lacking.items()))
    return (
        f"checkpoint_in_memory: {len(lacking)} of {group.world_size} ranks have their part "
        f"from disk: rank {rank}: {why}"
    )


def model_identity(config: Config) -> dict[str, Any]:
    """Return what must not change between a checkpoint and its resumption."""
    return identity(config.model.sizes)


def _changeable_sizes(model: dict[str, Any]) -> dict[str, Any]:
    """Pick the sizes that a resumption may change; `context` goes with seq_length."""
    return {name: model[name] for name in sorted(WITHOUT_EFFECT - {"context"}) if name in model}


def changeable_settings(config: Config, feed: DataFeed, device: torch.device) -> dict[str, Any]:
    """Return what a resumption may change, but seldom means to.

    feed: the training data; device: what computes.
    """
    narrow = compute_dtype(config.parallel.precision, device) == torch.bfloat16
    optim = asdict(config.optim)
    rates = optim.pop("schedule")
    return {
        "schedule": rates.pop("name"),
        **rates,
        **optim,
        "num_steps": config.run.num_steps,
        "seed": config.run.seed,
        "seq_length": config.data.seq_length,
        "shuffle_buffer": config.data.shuffle_buffer,
        "position_weighting": config.data.position_weighting,
        "reset_documents": feed.documents,  # as auto was decided
        "document_end": config.data.document_end,
        "global_batch": feed.step_sequences,
        "precision": "bf16" if narrow else "fp32",  # as auto was decided
        "reduce_precision": config.parallel.reduce_precision,
        "fp8": config.parallel.fp8,
    }


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List the settings that differ from the checkpoint's, compared as JSON stores them."""
    now = json.loads(json.dumps(now))
    return [
        f"{name}: the checkpoint was made with {before[name]}, this is {value}"
        for name, value in now.items()
        if name in before and before[name] != value
    ]
