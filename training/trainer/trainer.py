"""The training loop: steps, reports and checkpoints, until it is done or asked to stop."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from training.checkpoint import interval
from training.checkpoint.lease import RunLease
from training.checkpoint.manager import (
    Resumed,
    Saved,
    Saver,
    changeable_settings,
    model_identity,
)
from training.config.config import Config
from training.data.base import DataFeed
from training.data.loader import Prefetcher
from training.errors import SAVED, TrainingError
from training.job.restart.steps import StepNotes
from training.loggers.console import Console
from training.loggers.jsonl import FILE, has_record
from training.manifest import Manifest
from training.observers.phases import Phases
from training.observers.stop_request import StopRequest
from training.process_group import Group
from training.trainer.metrics import Metrics
from training.trainer.step import TrainStep, evaluate

COMPILED = 4
"""Steps of a run that only compiles: from the second on, their graphs are the same."""


@dataclass
class Trainer:
    """A run that is ready for its next step; its methods are collective calls.

    `training.trainer.run.set_up` makes it. `lease` is rank 0's lease of the run's folder.
    """

    config: Config
    group: Group
    lease: RunLease
    stop: StopRequest
    console: Console
    data: Prefetcher
    held_out: DataFeed | None
    model: nn.Module
    optimizer: torch.optim.Optimizer
    resumed: Resumed
    step: int  # the last one taken
    tokens_seen: int
    tokens_per_step: int
    train_step: TrainStep
    saver: Saver
    phase: Phases
    metrics: Metrics
    stopping: bool = False

    def __post_init__(self) -> None:
        self._last_compiled = self.step + COMPILED if self.config.run.compile_only else None
        self._first = self.step + 1  # of this start
        self._saved = time.monotonic()
        minutes = self.config.run.checkpoint_minutes
        self._longest = interval.FIRST if minutes is None else 60 * minutes  # between saves, s
        self._is_chosen = minutes is not None
        self._notes = StepNotes(self.step, self.resumed.seconds, self.resumed.in_memory)

    def run(self) -> int:
        """Train to the last step; return the exit code.

        0: done. 85: SIGTERM or SIGUSR1 came and a checkpoint was saved; start again to continue.
        Before the first step is over the process ends by itself, as StopRequest describes.
        """
        # Leave the watch before the loggers are closed: a server may take its time.
        with self.saver, self.metrics, self.phase:
            over = self._is_over()
            if over:
                self._evaluate_the_end()
            while not over and not self.stopping:
                over = self.turn()
            with self.phase("save"):
                self.saver.end()
            self._tell_saves()
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
        """Take a step, and do what is due after it; return whether it was the last."""
        run = self.config.run
        with self.phase("step"):
            taken = self.train_step.take(self.step + 1, self.tokens_seen)
            self.step += 1
            self.tokens_seen += self.tokens_per_step
            self.metrics.add(self.step, *taken, self.tokens_seen)
        last = self._is_over()
        asked, writing, lost, late = self.group.any_of(
            self.stop.made, self.saver.writing, bool(self.lease.lost), self._is_late()
        )
        if lost:
            raise TrainingError(self.lease.lost or "rank 0 has lost its lease of save_ckpt_path")
        self._notes.taken(self.step)
        if not writing:
            self.saver.end()
        if self.step == self._first:
            self.stop.first_step_is_over()
            self.metrics.flush()  # a person who waits for the first step sees it
        if self.step % run.report_interval == 0 or last:
            with self.phase("report"):
                self.metrics.report(self.data.waited())
        if self.held_out and (self.step % (run.eval_interval or run.num_steps) == 0 or last):
            if not asked:  # if asked, the checkpoint may have only seconds left
                asked = not self._evaluate(self.held_out)
            if asked:
                self._say(f"asked to stop: step {self.step} is not evaluated")
                last = False  # the next start does that
        self.stopping = asked and not last
        is_due = self.step % run.checkpoint_interval == 0 or last or self.stopping or late
        if is_due and not run.compile_only:
            with self.phase("save"):
                self._save()
        self._tell_saves()
        return last

    def _is_over(self) -> bool:
        """Whether the last step or the last epoch is done."""
        if self.step >= self.config.run.num_steps or self.step == self._last_compiled:
            return True
        if not self.config.data.epochs:
            return False
        with self.phase("data"):
            return not self.group.any(not self.data.ended())

    def _is_late(self) -> bool:
        """Whether a checkpoint is due by the time since the last one, on rank 0's clock."""
        return self.group.rank == 0 and 0 < self._longest <= time.monotonic() - self._saved

    def _evaluate(self, held_out: DataFeed) -> bool:
        """Evaluate and report; return False if it ended early, as the run was asked to stop."""
        self.metrics.flush()  # raises if the run has gone wrong: that is not worth evaluating
        since = time.perf_counter()
        batches = self.config.data.eval_batches
        with self.phase("evaluation"):
            found = evaluate(self.model, held_out, batches, self.group, self.stop)
        if found is None:
            return False
        self.metrics.evaluated(self.step, *found)
        if not found[1]:
            self._say(
                "WARNING: eval_dataset_path has no target to evaluate on; fix: hold out texts of "
                "at least two tokens"
            )
        self.metrics.pause(time.perf_counter() - since)
        return True

    def _evaluate_the_end(self) -> None:
        """Evaluate a run that is over, if it was asked to stop before it had done that."""
        if self.held_out is None or self.config.run.compile_only:
            return
        file = Path(self.config.run.save_ckpt_path, FILE)
        if self.group.any(self.group.rank == 0 and not has_record(file, "evaluation", self.step)):
            self.stopping = not self._evaluate(self.held_out)

    def _save(self) -> None:
        self.metrics.flush()  # raises if the run has gone wrong: that must not be saved
        self._saved = time.monotonic()
        self.saver.save(
            Manifest(
                step=self.step,
                tokens_seen=self.tokens_seen,
                world_size=self.group.world_size,
                model=model_identity(self.config),
                settings=changeable_settings(self.config, self.data.feed, self.group.device),
                data=self.data.state(self.group.gather),
                torch=torch.__version__,
            )
        )

    def _tell_saves(self) -> None:
        for one in self.saver.completed():
            self.metrics.saved(one.step, one.seconds, one.waited)
            if self.config.run.checkpoint_minutes is None:
                self._choose_interval(one)

    def _choose_interval(self, one: Saved) -> None:
        """Set the interval that is best for saves like this one; say so the first time."""
        nodes = self.group.nodes
        self._longest = interval.best_interval(one.waited, one.seconds - one.waited, nodes)
        if not self._is_chosen:
            self._say(interval.described(self._longest, one.waited, nodes))
            self._is_chosen = True

    def _say(self, text: str) -> None:
        if self.group.rank == 0:
            self.console.say(text)
