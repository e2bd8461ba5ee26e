"""The training loop: steps, reports, checkpoints; stops when it is done or is asked to stop."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType

import torch

from training import loggers, manifest, models, observers
from training.checkpoint import export, initial_weights, mirror
from training.checkpoint.dcp import STATE_BYTES
from training.checkpoint.lease import NO_LEASE, OwnLease, RunLease
from training.checkpoint.manager import Saver, changeable_settings, model_identity, resume
from training.checkpoint.mirror import Mirror
from training.config import degrees, lr_schedule
from training.config.config import Config
from training.data.base import DataFeed
from training.data.loader import Prefetcher
from training.data.remote import fetch_data
from training.data.sources import open_data, open_evaluation
from training.errors import SAVED, RequestError, TrainingError
from training.loggers.console import Console
from training.manifest import Manifest
from training.parallel import backend
from training.process_group import Group, stop
from training.trainer import flops
from training.trainer.metrics import Metrics, write_resolved
from training.trainer.step import TrainStep, evaluate

COMPILED = 4
"""Steps of a run that only compiles: from the second on, their graphs are the same."""


def run(config: Config) -> int:
    """Join the other ranks, train, leave; the exit code (see Trainer.run)."""
    group = backend.find_backend(config.parallel.backend).start(config)
    first = group.rank == 0
    with OwnLease(Path(config.run.save_ckpt_path)) if first else NO_LEASE as claim:
        trainer = Trainer(config, group, claim)
        try:
            code = trainer.run()
        finally:
            trainer.data.close()
        group.barrier()
        stop()  # not after an error: it may wait for ranks that wait for this one
        if code == 0 and first:
            export.write(
                config, trainer.console.say
            )  # takes minutes, which no other rank waits for
    return code


class StopRequest:
    """Set by SIGTERM, or by SIGUSR1, which Slurm users often ask for; looked at between steps."""

    def __init__(self) -> None:
        self.made = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._make)

    def _make(self, number: int, frame: FrameType | None) -> None:
        self.made = True


class Trainer:
    """A run: everything that can be wrong with the request is found while it is made.

    Making it is a collective call, and so are its methods. Raises RequestError. `claim` is what
    rank 0 has of the folder; a run without one must be the only one there.
    """

    def __init__(self, config: Config, group: Group, claim: RunLease = NO_LEASE) -> None:
        self.config, self.group, self.claim = config, group, claim
        self.backend = backend.find_backend(config.parallel.backend)
        self.stop, self.console = StopRequest(), Console()
        self.stopping = False
        run, optim = config.run, config.optim
        self._check()
        config = self.config = fetch_data(config, group, self._say)
        readers = group.data_rank, group.data_world_size
        self.data = group.together(lambda: open_data(config, *readers, group.device))
        for note in self.data.notes:
            self._say(note)
        self.held_out = group.together(lambda: open_evaluation(config, *readers))
        first = group.broadcast(self.data.feed.fingerprint)
        group.together(lambda: _require_same(self.data, first))
        samples = self.data.feed.global_batch * config.data.gradient_accumulation
        self.tokens_per_step = samples * config.data.seq_length
        lr_schedule.check(optim.schedule, run.num_steps, optim.learning_rate, self.tokens_per_step)
        if run.mirror_url:
            Mirror(run).pull(group, self._say)
        weights = initial_weights.weights(config, group, self._say)
        torch.manual_seed(run.seed + (0 if run.same_seed else group.rank))
        self.model = group.together(lambda: self.backend.build(config, group, weights))
        self.optimizer = self.backend.optimizer(self.model, config, group)
        trained = self.backend, self.model, self.optimizer
        self.step, self.tokens_seen = resume(config, group, *trained, self.data, self._say)
        self.compiled = self.step + COMPILED if run.compile_only else None
        takes = STATE_BYTES * self.parameters
        self.saver = Saver(config, *trained, group, self._say, claim, takes)
        if group.rank == 0:
            write_resolved(config, self.folder, group.world_size)
        self.phase = observers.observe(run, group, self.model, self.step, self.console, claim)
        self.stepper = TrainStep(*(config, group, *trained, self.data, self.phase, self._say))
        opened = group.together(
            lambda: loggers.open_loggers(config, self.step, self.console) if group.rank == 0 else []
        )
        self.metrics = Metrics(
            opened,
            group,
            tokens_per_step=self.tokens_per_step,
            seq_length=config.data.seq_length,
            parameters=self.parameters,
            may_skip=run.on_nan == "skip" or run.compile_only,
            operations_per_token=flops.per_token(config.model.sizes, config.data.seq_length),
        )

    def run(self) -> int:
        """Train to the last step; the exit code.

        0: done. 85: SIGTERM or SIGUSR1 came and a checkpoint was saved, start again to go on.
        """
        with self.saver, self.phase, self.metrics:
            over = self._is_over()
            while not over and not self.stopping:
                over = self.turn()
            with self.phase("save"):
                self.saver.end()
        if self.stopping:
            self._say(f"asked to stop after step {self.step}: start again to go on")
            return SAVED
        if self.config.run.compile_only:
            self._say(f"compile_only: {COMPILED} steps were taken, and nothing is saved")
        elif self.step < self.config.run.num_steps:
            self._say(f"epochs: {self.config.data.epochs} passes over the data are done")
        self._say(f"done: {self.step} steps, {self.tokens_seen:,} tokens")
        return 0

    def turn(self) -> bool:
        """Take a step, and do what is due after it; whether it was the last."""
        run = self.config.run
        with self.phase("step"):
            taken = self.stepper.take(self.step + 1)
            self.step += 1
            self.tokens_seen += self.tokens_per_step
            self.metrics.add(self.step, *taken, self.tokens_seen)
        last = self._is_over()
        asked, writing, lost = self.group.any_of(
            self.stop.made, self.saver.writing, bool(self.claim.lost)
        )
        if lost:
            raise TrainingError(self.claim.lost or "rank 0 has lost its claim on save_ckpt_path")
        self.stopping = asked and not last
        if not writing:
            self.saver.end()
        if self.step % run.report_interval == 0 or last:
            with self.phase("report"):
                self.metrics.report(self.data.waited())
        if self.held_out and (self.step % (run.eval_interval or run.num_steps) == 0 or last):
            with self.phase("evaluation"):
                self._evaluate(self.held_out)
        is_due = self.step % run.checkpoint_interval == 0 or last or self.stopping
        if is_due and not run.compile_only:
            with self.phase("save"):
                self._save()
        return last

    def _check(self) -> None:
        """Find what does not need data or model; raises RequestError."""
        config, group, run = self.config, self.group, self.config.run
        group.together(lambda: self.backend.check(config, group))
        observers.check(run, group.device)
        for warning in degrees.warnings(group.tensor_parallel, group.local_world_size):
            self._say(f"WARNING: {warning}")
        self.folder = Path(run.save_ckpt_path)
        self.parameters = models.parameters(config.model.sizes)

        def alone() -> None:
            loggers.check(run)
            export.check(config)
            self.claim.take(self._say)
            manifest.prepare(run.save_ckpt_path, STATE_BYTES * self.parameters)

        group.together(lambda: alone() if group.rank == 0 else None)
        mirror.check(run, group)
        self._say(f"{config.model.name}: {self.parameters:,} parameters")

    def _is_over(self) -> bool:
        """Whether the last step or the last epoch is done."""
        if self.step >= self.config.run.num_steps or self.step == self.compiled:
            return True
        if not self.config.data.epochs:
            return False
        with self.phase("data"):
            return not self.group.any(not self.data.ended())

    def _evaluate(self, held_out: DataFeed) -> None:
        since = time.perf_counter()
        batches = self.config.data.eval_batches
        loss, tokens = evaluate(self.model, held_out, batches, self.group)
        self.metrics.evaluated(self.step, loss, tokens)
        self.metrics.pause(time.perf_counter() - since)

    def _save(self) -> None:
        self.metrics.flush()  # raises if the run has gone wrong: that must not be saved
        self.saver.save(
            Manifest(
                step=self.step,
                tokens_seen=self.tokens_seen,
                world_size=self.group.world_size,
                model=model_identity(self.config),
                settings=changeable_settings(self.config),
                data=self.data.state(self.group.gather),
                torch=torch.__version__,
            )
        )

    def _say(self, text: str) -> None:
        if self.group.rank == 0:
            self.console.say(text)


def _require_same(data: Prefetcher, first: str) -> None:
    if data.feed.fingerprint != first:
        raise RequestError("dataset_path: this rank sees other files than rank 0")
