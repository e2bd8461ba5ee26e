"""What happens around each step: learning rate, clipping, an early end, and the run's records.

Composer's measurements become the records of metrics.jsonl, and one line per step for people. The
kinds of records are those of training.trainer.metrics: a step and a report for each step, an
evaluation for each held-out set, which also has its `label`, `top3` and `top10`. tokens_seen is
Composer's count, one more per sample than there are targets. Composer's settings go to
hparams.json. Only rank 0 writes.
"""

from __future__ import annotations

import json
import math
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from training import loggers, models
from training.checkpoint.lease import RunLease
from training.config import lr_schedule
from training.errors import TrainingError, writing
from training.job.restart.steps import StepNotes
from training.loggers.base import FaultTolerantLogger, Record
from training.loggers.console import Console
from training.loggers.jsonl import FILE, JsonLines
from training.loggers.text import TextLogger
from training.models import Sizes
from training.observers.stop_request import StopRequest
from training.parallel.optimizer import clip_gradients, set_learning_rate
from training.systems.composer.config import ComposerConfig
from training.trainer import flops
from training.trainer.metrics import device_name, peak_memory

SETTINGS_FILE = "hparams.json"


class LearningRate(Callback):
    """Sets the rate of each step before it is taken, from the run's tokens alone.

    Composer's own schedulers are asked before its clock advances, so they lag one step behind the
    formula; and a resumed run would begin with the rate that its checkpoint was made with.
    """

    def __init__(self, config: ComposerConfig) -> None:
        self.config, self.rate = config, 0.0

    def batch_start(self, state: State, logger: Logger) -> None:
        config = self.config
        tokens = int(state.timestamp.token) + config.tokens_per_step
        self.rate = config.optimizer.lr * lr_schedule.share(
            config.schedule, tokens, config.num_steps, config.tokens_per_step
        )
        set_learning_rate(state.optimizers[0], self.rate)
        logger.log_metrics({"lr": self.rate})


class Clipping(Callback):
    """Scales a step's gradients to a global norm of at most a threshold.

    Composer's own clipping does not report the norm, and on torch 2.2 sums it in another order in
    each process, so that a resumed run would differ in the last digits.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.norm: Tensor | None = None  # (), of the last step, before scaling

    def after_train_batch(self, state: State, logger: Logger) -> None:
        modules = state.model.modules()
        sharded = next((one for one in modules if isinstance(one, FullyShardedDataParallel)), None)
        self.norm = clip_gradients(sharded or state.model, self.threshold)  # ()


class Described(Callback):
    """Stores the sizes of the model in each checkpoint, for training.convert."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def state_dict(self) -> dict[str, Any]:
        return {"family": self.sizes.family, "sizes": asdict(self.sizes)}


class Stopping(Callback):
    """Ends the run after a step once any rank was asked to stop; Composer then saves.

    It also notes the steps, for the handling of failures.
    """

    def __init__(self, request: StopRequest) -> None:
        self._request = request
        self._notes: StepNotes | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        self._notes = StepNotes(int(state.timestamp.batch))

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._notes:
            self._notes.taken(int(state.timestamp.batch))
        self._request.first_step_is_over()
        asked = state.device.tensor_to_device(torch.tensor([int(self._request.made)]))  # (1,)
        dist.all_reduce(asked, "MAX")
        if asked.item():
            state.evaluators = []  # there is only time to save
            state.stop_training()


class Records(LoggerDestination):
    """Takes what Composer logs; stops the run if the loss or the gradient norm is not finite."""

    def __init__(
        self,
        config: ComposerConfig,
        folder: Path,
        rate: LearningRate,
        clipping: Clipping,
        console: Console,
        device: torch.device,
        run_loggers: list[loggers.Logger],
        lease: RunLease,
    ) -> None:
        self.config, self.folder, self._lease = config, folder, lease
        self.rate, self.clipping, self.console, self.device = rate, clipping, console, device
        self._loggers = run_loggers
        self._logged: dict[str, Any] = {}
        self._settings: dict[str, Any] = {}
        self._clock: deque[float] = deque(maxlen=config.general.window_size + 1)  # seconds

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._logged |= metrics

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self._settings |= hyperparameters

    def fit_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            done = int(state.timestamp.batch)
            lines = FaultTolerantLogger(JsonLines(self.folder, done), FILE, self.console)
            self._loggers = [lines, TextLogger(self.config.num_steps, self.console), *self._loggers]
            path = self.folder / SETTINGS_FILE
            with writing(path):
                path.write_text(json.dumps(self._settings, indent=2, default=str) + "\n")
        self._clock.append(_seconds(state))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Report a step. Raises TrainingError before anything of it is saved.

        It is raised on every rank for a number that is not finite; on rank 0 alone, after which the
        launcher ends all ranks, if its lease of the folder is lost.
        """
        self._lease.check()
        assert self.clipping.norm is not None
        step: Record = {
            "kind": "step",
            "step": int(state.timestamp.batch),
            "loss": float(self._logged["loss/train/total"]),
            "grad_norm": self.clipping.norm.item(),
            "learning_rate": self.rate.rate,
            "tokens_seen": int(state.timestamp.token),
        }
        for what in ("loss", "grad_norm"):
            if not math.isfinite(step[what]):
                raise TrainingError(
                    f"step {step['step']}: {what} is {step[what]}; the run stops here, and no "
                    "checkpoint has been written since; fix: try a lower optimizer.lr or "
                    "general.clipping_threshold"
                )
        logger.log_metrics({"grad_norm": step["grad_norm"]})
        self._clock.append(_seconds(state))
        seconds = (self._clock[-1] - self._clock[0]) / (len(self._clock) - 1)  # of a step
        self._tell([step, {**step, "kind": "report", **self._speed(seconds)}])

    def eval_end(self, state: State, logger: Logger) -> None:
        label = state.dataloader_label
        prefix = f"metrics/{label}/"
        found = {
            name.removeprefix(prefix): float(value)
            for name, value in self._logged.items()
            if name.startswith(prefix)
        }
        record = {"kind": "evaluation", "step": int(state.timestamp.batch), "label": label, **found}
        self._tell([{**record, "tokens": int(found["tokens"])}])

    def close(self, state: State, logger: Logger) -> None:
        with ExitStack() as last:  # close all, even if one cannot write what is left
            for one in self._loggers:
                last.callback(one.close, state.timestamp < state.max_duration)

    def _speed(self, seconds: float) -> Record:
        """Return the speed, given the seconds per step."""
        data, world_size = self.config.data, dist.get_world_size()
        targets = data.global_batch_size * data.seq_len / world_size
        operations = flops.per_token(self.config.model.sizes, data.seq_len) * targets
        peak = flops.peak(device_name(self.device))
        return {
            "tokens_per_second_per_device": self.config.tokens_per_step / world_size / seconds,
            "tokens_per_second": self.config.tokens_per_step / seconds,
            "seconds_per_step": seconds,
            "samples_per_second": data.global_batch_size / seconds,
            "tflops": flops.model_tflops(
                models.parameters(self.config.model.sizes), targets / seconds
            ),
            "mfu": None if peak is None else operations / seconds / peak,
            "memory_bytes": peak_memory(self.device),
        }

    def _tell(self, records: list[Record]) -> None:
        for one in self._loggers:
            one.write(records)


def _seconds(state: State) -> float:
    """Return the seconds of training so far, without evaluations."""
    wall: Any = state.timestamp.total_wct
    return float(wall.total_seconds())
