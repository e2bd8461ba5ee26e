"""The training loop: steps, reports, checkpoints; stops when it is done or is asked to stop."""

from __future__ import annotations

import json
import math
import signal
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training import checkpoint, flops, initial, manifest, schedule
from training.config import Config, write_resolved
from training.data import open_data, open_evaluation
from training.data.reader import Reader
from training.errors import SAVED, RequestError, TrainingError
from training.evaluation import evaluate
from training.manifest import Manifest
from training.metrics import Metrics
from training.ops.loss import counted
from training.optim import clip_gradients, make_optimizer, set_learning_rate
from training.parallel import fsdp, memory
from training.parallel.group import Group, start, stop
from training.profile import profiler
from training.trace import look_at_gradients, trace

MOST_SKIPPED = 10
"""Steps in a row that may be left out because their gradients are no numbers."""


def run(config: Config) -> int:
    """Join the other ranks, train, leave; the exit code (see Trainer.run)."""
    group = start(config.run.device, cpu_offload=config.parallel.cpu_offload)
    code = Trainer(config, group).run()
    group.barrier()
    stop()  # not after an error: it may wait for ranks that wait for this one
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

    Making it is a collective call, and so are its methods. Raises RequestError.
    """

    def __init__(self, config: Config, group: Group) -> None:
        self.config, self.group = config, group
        self.stop = StopRequest()
        run = config.run
        group.together(lambda: memory.check(config, group.device))
        self.folder = Path(run.save_ckpt_path)
        group.together(lambda: manifest.prepare(run.save_ckpt_path) if group.rank == 0 else None)
        self.data = group.together(lambda: open_data(config, group.rank, group.world_size))
        for note in getattr(self.data.samples, "notes", ()):
            self._say(f"dataset_path: {note}")
        self.held_out = group.together(
            lambda: open_evaluation(config, group.rank, group.world_size)
        )
        first = group.broadcast(self.data.fingerprint)
        group.together(lambda: _require_same(self.data, first))
        samples = self.data.global_batch * config.data.gradient_accumulation
        self.tokens_per_step = samples * config.data.seq_length
        optim = config.optim
        schedule.check(optim.schedule, run.num_steps, optim.learning_rate, self.tokens_per_step)
        torch.manual_seed(run.seed + group.rank)
        weights = initial.weights(config, group, self._say)
        self.model = group.together(
            lambda: fsdp.build(config.model.sizes, config.parallel, group, run.seed, weights)
        )
        self.skipped = 0  # steps in a row
        if run.trace_nan:
            trace(self.model, self._where)
        self.optimizer = make_optimizer(self.model, config.optim, group.device)
        self.step, self.tokens_seen = self._resume()
        if group.rank == 0:
            write_resolved(config, self.folder, group.world_size)
        self.metrics = Metrics(
            self.folder,
            group,
            start=self.step,
            num_steps=run.num_steps,
            tokens_per_step=self.tokens_per_step,
            may_skip=run.on_nan == "skip",
            operations_per_token=flops.per_token(config.model.sizes, config.data.seq_length),
        )

    def run(self) -> int:
        """Train to the last step; the exit code.

        0: done. 85: SIGTERM or SIGUSR1 came and a checkpoint was saved, start again to go on.
        """
        run = self.config.run
        with profiler(run.use_profiler, run.save_ckpt_path, self.group) as trace:
            while self.step < run.num_steps:
                self._advance()
                if trace is not None:
                    trace.step()
                last = self.step == run.num_steps
                stopping = self.group.any(self.stop.made) and not last
                if self.step % run.report_interval == 0 or last:
                    self.metrics.report()
                if self.step % (run.eval_interval or run.num_steps) == 0 or last:
                    self._evaluate()
                if self.step % run.checkpoint_interval == 0 or last or stopping:
                    self._save()
                if stopping:
                    self._say(f"asked to stop after step {self.step}: start again to go on")
                    return SAVED
        self._say(f"done: {self.step} steps, {self.tokens_seen:,} tokens")
        return 0

    def _advance(self) -> None:
        """One step of the optimizer."""
        optim = self.config.optim
        rate = schedule.learning_rate(
            optim.schedule,
            self.step + 1,
            self.config.run.num_steps,
            optim.learning_rate,
            self.tokens_per_step,
        )
        set_learning_rate(self.optimizer, rate)
        loss = self._backward()  # ()
        if self.config.run.trace_nan:
            look_at_gradients(self.model, self._where)
        norm = clip_gradients(self.model, optim.grad_clip_thresh)  # ()
        if self._may_step(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens_seen += self.tokens_per_step
        self.metrics.add(self.step, loss, norm, rate, self.tokens_seen)

    def _may_step(self, norm: Tensor) -> bool:
        """Tell whether the gradients can be used; on_nan=skip waits for the device to know.

        The norm is that of all ranks, so all decide alike. Raises TrainingError after too many
        steps in a row that were left out.
        """
        if self.config.run.on_nan == "stop":
            return True  # metrics stop the run before anything of it is saved
        if math.isfinite(norm.item()):
            self.skipped = 0
            return True
        self.skipped += 1
        self._say(f"step {self.step + 1}: the gradient norm is {norm.item()}, the step is left out")
        if self.skipped >= MOST_SKIPPED:
            raise TrainingError(f"{self.skipped} steps in a row were left out; the run stops here")
        return False

    def _where(self) -> str:
        """Tell the step that is under way, and what it reads."""
        each = self.data.global_batch * self.config.data.gradient_accumulation
        first = self.data.position - each
        return f"step {self.step + 1}, samples {first:,} to {self.data.position - 1:,} of the order"

    def _backward(self) -> Tensor:
        """Add up the gradients of a step's batches; this rank's part of the loss, ().

        Each target counts alike, wherever it is: the sum over all ranks and batches is over what
        counts in all of them. The mean over ranks, which FSDP takes of the gradients and the
        metrics of the losses, is then the step's own.
        """
        device = self.group.device
        batches = [self.data.next_batch() for _ in range(self.config.data.gradient_accumulation)]
        batches = [batch.to(device) for batch in batches]
        total = torch.stack([counted(one.targets, one.weights) for one in batches]).sum()  # ()
        dist.all_reduce(total)
        total = (total / self.group.world_size).clamp(min=1e-30)  # (): 0 where none counts
        losses = []
        for batch in batches:
            loss = self.model(batch.inputs, batch.targets, weights=batch.weights, total=total)  # ()
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()  # ()

    def _evaluate(self) -> None:
        if self.held_out is None:
            return
        since = time.perf_counter()
        batches = self.config.data.eval_batches
        loss, tokens = evaluate(self.model, self.held_out, batches, self.group)
        self.metrics.evaluated(self.step, loss, tokens)
        self.metrics.pause(time.perf_counter() - since)

    def _save(self) -> None:
        self.metrics.flush()  # raises if the run has gone wrong: that must not be saved

        def describe(files: dict[str, int]) -> Manifest:
            return Manifest(
                step=self.step,
                tokens_seen=self.tokens_seen,
                world_size=self.group.world_size,
                model=_identity(self.config),
                settings=_settings(self.config),
                data=self.data.state(),
                torch=torch.__version__,
                files=files,
            )

        path = checkpoint.save(
            self.config.run.save_ckpt_path,
            self.step,
            self.model,
            self.optimizer,
            self.group,
            describe,
            self.config.run.keep_checkpoints,
            self.config.run.keep_every,
        )
        self._say(f"saved {path}")

    def _resume(self) -> tuple[int, int]:
        """Load the newest complete checkpoint, if any; (step, tokens seen) to go on from.

        The save folder comes first: what this run wrote is newer than what it began from.
        """
        run = self.config.run
        found = checkpoint.find(run.checkpoint_folders, self.group, self._say)
        if found is None:
            self._say("no checkpoint found: starting at step 0")
            return 0, 0
        path, told = found
        if told.step > run.num_steps:
            raise RequestError(
                f"num_steps: {run.num_steps} is less than the {told.step} steps of {path}"
            )
        checkpoint.load(path, told, self.model, self.optimizer, self.group, _identity(self.config))
        self._say(f"resumed from {path} at step {told.step}")
        for change in _changes(told.settings, _settings(self.config)):
            self._say(f"WARNING: {change}; what was asked for now counts")
        if told.world_size != self.group.world_size:
            self._say(f"it was saved by {told.world_size} ranks, now {self.group.world_size}")
        if not self.data.resume(told.data):
            self._say("WARNING: it was trained on other data; this data is read from its beginning")
        return told.step, told.tokens_seen

    def _say(self, text: str) -> None:
        if self.group.rank == 0:
            print(text, flush=True)


def _identity(config: Config) -> dict[str, Any]:
    """Give what must not change between a checkpoint and its resumption."""
    sizes = config.model.sizes
    return {"family": sizes.family, **asdict(sizes)}


def _settings(config: Config) -> dict[str, Any]:
    """Give what a resumption may change, but seldom means to."""
    optim = asdict(config.optim)
    rates = optim.pop("schedule")
    return {
        "schedule": rates.pop("name"),
        **rates,
        **optim,
        "num_steps": config.run.num_steps,
        "seed": config.run.seed,
        "gradient_accumulation": config.data.gradient_accumulation,
    }


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List the settings of a checkpoint that are others now, as they are after a JSON file."""
    now = json.loads(json.dumps(now))
    return [
        f"{name}: the checkpoint was made with {before[name]}, this is {value}"
        for name, value in now.items()
        if name in before and before[name] != value
    ]


def _require_same(data: Reader, first: str) -> None:
    if data.fingerprint != first:
        raise RequestError("dataset_path: this rank sees other files than rank 0")
