"""A run from its configuration to its exit code: its parts are built in order, then trained."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from training import loggers, manifest, models, observers
from training.checkpoint import export, initial_weights, mirror
from training.checkpoint.dcp import STATE_BYTES
from training.checkpoint.lease import NO_LEASE, OwnLease, RunLease
from training.checkpoint.manager import Saver, require_start, resume
from training.checkpoint.memory_choice import open_copies
from training.checkpoint.mirror import Mirror
from training.config import degrees, lr_schedule
from training.config.config import Config
from training.config.global_batch import accumulate, ranks_at_start, share_out
from training.data.base import DataFeed
from training.data.loader import Prefetcher
from training.data.remote import fetch_data
from training.data.shared import open_shared
from training.data.sources import feed_of, open_data
from training.errors import RequestError
from training.loggers.console import Console
from training.observers.stop_request import StopRequest
from training.parallel.backend import Backend, find_backend
from training.process_group import Group, stop
from training.trainer import flops
from training.trainer.metrics import Metrics, write_resolved
from training.trainer.step import TrainStep
from training.trainer.trainer import Trainer

Say = Callable[[str], None]


def run(config: Config) -> int:
    """Join the other ranks, train, and leave; return the exit code (see Trainer.run)."""
    phases = StartUp()
    group = find_backend(config.parallel.backend).start(config)
    phases.end("ranks")
    first = group.rank == 0
    with OwnLease(Path(config.run.save_ckpt_path)) if first else NO_LEASE as lease:
        trainer = set_up(config, group, lease, phases)
        try:
            code = trainer.run()
        finally:
            trainer.data.close()
        group.barrier()
        stop()  # not after an error: it may wait for ranks that wait for this one
        if code == 0 and first and not config.run.compile_only:
            # This takes minutes; no other rank waits for it.
            export.write(config, trainer.console.say)
    return code


class StartUp:
    """How long the parts of a start take, until the first step."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._seconds: dict[str, float] = {}

    def end(self, part: str) -> None:
        """Note that a part has ended and the next begins."""
        now = time.monotonic()
        self._seconds[part] = now - self._since
        self._since = now

    def __str__(self) -> str:
        return "start-up: " + ", ".join(f"{part} {s:.1f} s" for part, s in self._seconds.items())


def set_up(
    config: Config, group: Group, lease: RunLease = NO_LEASE, phases: StartUp | None = None
) -> Trainer:
    """Prepare a run for its next step; all faults of the request are found here.

    A collective call. `lease` is rank 0's lease of the folder; a run without one must be the only
    one there. Raises RequestError.
    """
    phases = phases or StartUp()
    stop_request, console = StopRequest(lease.release, group.rank), Console()
    say = console.say if group.rank == 0 else _nothing
    backend = find_backend(config.parallel.backend)
    parameters = models.parameters(config.model.sizes)
    at_start, readers = _readers_at_start(group), group.data_world_size
    asked = accumulate(config, at_start)
    _check(share_out(asked, at_start, readers), group, backend, lease, parameters, say)

    asked = fetch_data(asked, group, say)
    config = share_out(asked, at_start, readers)
    data, held_out = _open_data(config, group, say)
    tokens_per_step = data.feed.step_sequences * config.data.seq_length
    if readers != at_start:
        say(_described(config, group, data.feed))
    phases.end("data")
    run, optim = config.run, config.optim
    lr_schedule.check(optim.schedule, run.num_steps, optim.learning_rate, tokens_per_step)
    for warning in lr_schedule.warnings(optim.schedule, run.num_steps):
        say(f"WARNING: {warning}")

    if run.mirror_url:
        Mirror(run).pull(group, say)
    group.by_first(lambda: require_start(run))
    size = STATE_BYTES * parameters
    copies = open_copies(config, group, size, say)
    model, optimizer = _build_model(config, group, backend, say)
    phases.end("model")
    resumed = resume(config, group, backend, model, optimizer, data, say, copies)
    phases.end("checkpoint")
    say(str(phases))
    saver = Saver(config, backend, model, optimizer, group, say, lease, size, copies)

    if group.rank == 0:
        write_resolved(
            asked,
            Path(run.save_ckpt_path),
            group.world_size,
            parameters=parameters,
            tokens_per_step=tokens_per_step,
        )
    phase = observers.observe(run, group, model, resumed.step, console, lease)
    return Trainer(
        config=config,
        group=group,
        lease=lease,
        stop=stop_request,
        console=console,
        data=data,
        held_out=held_out,
        model=model,
        optimizer=optimizer,
        resumed=resumed,
        step=resumed.step,
        tokens_seen=resumed.tokens_seen,
        tokens_per_step=tokens_per_step,
        train_step=TrainStep(config, group, backend, model, optimizer, data, phase, say),
        saver=saver,
        phase=phase,
        metrics=_open_metrics(config, group, resumed.step, tokens_per_step, parameters, console),
    )


def _readers_at_start(group: Group) -> int:
    """Count the data-parallel ranks that the job began with, which define its steps."""
    ranks = ranks_at_start(group.world_size, os.environ)
    return ranks // (group.tensor_parallel * group.context_parallel)


def _described(config: Config, group: Group, feed: DataFeed) -> str:
    """Describe how fewer ranks than at the start take the same steps."""
    data = config.data
    spare = data.batch_size * group.data_world_size * data.gradient_accumulation
    spare -= feed.step_sequences
    empty = f", of which {spare:,} are empty" if spare else ""
    return (
        f"a step has {feed.step_sequences:,} sequences, as at the start of the job: "
        f"{data.gradient_accumulation} batches of {data.batch_size} on each of "
        f"{group.data_world_size} data-parallel ranks{empty}"
    )


def _check(
    config: Config, group: Group, backend: Backend, lease: RunLease, parameters: int, say: Say
) -> None:
    """Check what needs neither data nor model, and take the folder's lease; raises RequestError."""
    run = config.run
    group.together(lambda: backend.check(config, group))
    observers.check(run, group.device)
    for warning in degrees.warnings(group.tensor_parallel, group.local_world_size):
        say(f"WARNING: {warning}")

    def alone() -> None:
        loggers.check(run)
        export.check(config)
        lease.take(say)
        for fault in manifest.prepare(run.save_ckpt_path, STATE_BYTES * parameters):
            say(f"WARNING: {fault}")

    group.together(lambda: alone() if group.rank == 0 else None)
    mirror.check(run, group)
    say(f"{config.model.name}: {parameters:,} parameters")


def _open_data(config: Config, group: Group, say: Say) -> tuple[Prefetcher, DataFeed | None]:
    """Open the training data, with the same files on all ranks, and the held-out data, if any."""
    readers = group.data_rank, group.data_world_size
    source = open_shared(config, "dataset_path", group)
    data = group.together(lambda: open_data(config, source, *readers, group.device))
    for note in data.notes:
        say(note)
    if data.feed.documents:
        say("reset_documents: state and attention begin anew with each document")
    setting, held_out = "eval_dataset_path", None
    if config.data.eval_dataset_path:
        other = open_shared(config, setting, group)
        held_out = group.together(lambda: feed_of(config, setting, other, *readers))
    first = group.broadcast(data.feed.fingerprint)
    group.together(lambda: _require_same(data, first))
    return data, held_out


def _require_same(data: Prefetcher, first: str) -> None:
    if data.feed.fingerprint != first:
        raise RequestError("dataset_path: this rank and rank 0 see different files")


def _build_model(
    config: Config, group: Group, backend: Backend, say: Say
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the model with its initial weights, spread over the ranks, and its optimizer."""
    weights = initial_weights.weights(config, group, say)
    torch.manual_seed(config.run.seed + (0 if config.run.same_seed else group.rank))
    model = group.together(lambda: backend.build(config, group, weights))
    return model, backend.optimizer(model, config, group)


def _open_metrics(
    config: Config, group: Group, step: int, tokens_per_step: int, parameters: int, console: Console
) -> Metrics:
    """Open the metrics of a run that continues after a step; only rank 0 writes them."""
    opened = group.together(
        lambda: loggers.open_loggers(config, step, console) if group.rank == 0 else []
    )
    return Metrics(
        opened,
        group,
        tokens_per_step=tokens_per_step,
        seq_length=config.data.seq_length,
        parameters=parameters,
        may_skip=config.run.on_nan == "skip" or config.run.compile_only,
        operations_per_token=flops.per_token(config.model.sizes, config.data.seq_length),
    )


def _nothing(text: str) -> None:
    """Stand in for `say` on all ranks but the first."""
