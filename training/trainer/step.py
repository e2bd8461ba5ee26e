"""One step of the optimizer, one evaluation, and the search for the first non-finite number.

A step reads, goes forward and backward, clips and updates. Inspecting every module's output makes a
device wait, so trace_nan is for a run that has failed: started again, it continues from the last
checkpoint, repeats the same steps, and fails with names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training import compat
from training.config import lr_schedule
from training.config.config import Config
from training.data.base import DataFeed, Sample
from training.data.loader import Prefetcher
from training.errors import TrainingError
from training.observers.phases import Phases
from training.observers.stop_request import StopRequest
from training.ops.loss import counted
from training.parallel.backend import Backend
from training.parallel.optimizer import set_learning_rate
from training.process_group import Group

MOST_SKIPPED = 10
"""Steps in a row that may be left out because their loss or gradients are not finite."""


class Taken(NamedTuple):
    """The result of a step: this rank's part of its loss, (), and the whole gradient's norm, ()."""

    loss: Tensor
    grad_norm: Tensor
    learning_rate: float


class TrainStep:
    """Takes steps, on all ranks together. `phase` is entered for each part."""

    def __init__(
        self,
        config: Config,
        group: Group,
        backend: Backend,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Prefetcher,
        phase: Phases,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.group, self.backend = config, group, backend
        self.phase, self.say = phase, say
        self.model, self.optimizer, self.data = model, optimizer, data
        self.accumulation = config.data.gradient_accumulation
        self.samples = data.feed.step_sequences
        self.step = 0  # the one in progress
        self.skipped = 0  # steps in a row that were left out
        if config.run.trace_nan:
            trace_nonfinite(model, self._where)

    def take(self, step: int, tokens_seen: int) -> Taken:
        """Take this step, counted from 1, after so many tokens. Raises TrainingError."""
        optim, self.step = self.config.optim, step
        rate = lr_schedule.learning_rate(
            optim.schedule,
            step,
            self.config.run.num_steps,
            optim.learning_rate,
            self.samples * self.config.data.seq_length,
            tokens_seen,
        )
        set_learning_rate(self.optimizer, rate)
        loss = self._backward()  # ()
        if self.config.run.trace_nan:
            check_gradients(self.model, self._where)
        with self.phase("clip"):
            norm = self.backend.clip(self.model, self.optimizer, optim.grad_clip_thresh)  # ()
            usable = self._is_usable(loss, norm)
        with self.phase("optimizer"):
            if usable:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.backend.mark(self.group)
        return Taken(loss, norm, rate)

    def _backward(self) -> Tensor:
        """Sum the gradients of a step's batches; return this rank's part of the loss, ().

        Each target counts the same, wherever it is: the sum over all ranks and batches is divided
        by the total that counts in all of them. The mean over ranks, which FSDP takes of the
        gradients and the metrics of the losses, is then the step's own.
        """
        with self.phase("data"):
            batches = [self.data.next_batch() for _ in range(self.accumulation)]
        total = torch.stack([counted(one.targets, one.weights) for one in batches]).sum()  # ()
        dist.all_reduce(total)
        # Each of the ranks that share rows counts them whole, but has only its piece's loss.
        ranks = self.group.world_size * self.group.context_parallel
        total = (total / ranks).clamp(min=1e-30)  # (): avoids 0 / 0 if none counts
        losses = []
        for batch in batches:
            with self.phase("forward"):
                loss = loss_of(self.model, batch, total)  # ()
            with self.phase("backward"):
                loss.backward()
                self.backend.mark(self.group)
            losses.append(loss.detach())
        return torch.stack(losses).sum()  # ()

    def _is_usable(self, loss: Tensor, norm: Tensor) -> bool:
        """Return whether the step can be taken; on_nan=skip waits for the device to know.

        loss: (), this rank's part. The norm is that of all ranks, and their losses are added up as
        the metrics do, so all decide alike (a collective call). Raises TrainingError if too many
        steps in a row were left out.
        """
        if self.config.run.on_nan == "stop":
            return True  # metrics stop the run before anything is saved
        total = loss.float().clone()  # (): a finite gradient may have a loss that overflows
        dist.all_reduce(total)
        shown = {"loss": total.item(), "gradient norm": norm.item()}
        lost = [what for what, value in shown.items() if not math.isfinite(value)]
        if not lost:
            self.skipped = 0
            return True
        self.skipped += 1
        what = lost[-1]
        self.say(f"step {self.step}: the {what} is {shown[what]}, the step is left out")
        if self.skipped >= MOST_SKIPPED:
            raise TrainingError(f"{self.skipped} steps in a row were left out; the run stops here")
        return False

    def _where(self) -> str:
        """Describe the step in progress, and what it reads."""
        end = self.data.feed.position
        return f"step {self.step}, samples {end - self.samples:,} to {end - 1:,} of the order"


def loss_of(model: nn.Module, batch: Sample, total: Tensor) -> Tensor:
    """Run a batch through the model: the weighted sum over its targets, over `total`, ()."""
    loss: Tensor = model(
        batch.inputs, batch.targets, weights=batch.weights, total=total, seq_idx=batch.seq_idx
    )  # ()
    return loss


@torch.no_grad()
def evaluate(
    model: nn.Module, data: DataFeed, batches: int, group: Group, stop: StopRequest
) -> tuple[float, int] | None:
    """Return the mean loss over the targets that count, and their number (a collective call).

    batches: maximum per rank; 0 for all that there are. No sample is taken twice. None if the run
    is asked to stop before the end.
    """
    data.rewind()
    sums = torch.zeros(2, dtype=torch.float64, device=group.device)  # loss, weight
    one = torch.ones((), device=group.device)  # (): makes the model return the sum
    was_training = model.training
    model.eval()
    for _ in range(batches) if batches else count():
        part = data.next_rows(range(data.batch_size))
        more, asked = group.any_of(not part.spent, stop.made)
        if asked:
            model.train(was_training)
            return None
        if not more:
            break
        batch = part.rows.to(group.device)
        loss = loss_of(model, batch, one)  # ()
        weight = counted(batch.targets, batch.weights) / group.context_parallel  # ()
        sums += torch.stack((loss, weight))  # (2,)
    model.train(was_training)
    dist.all_reduce(sums)
    summed, tokens = (sums / group.tensor_parallel).tolist()  # ranks that share layers count once
    return summed / max(tokens, 1e-30), round(tokens)


def trace_nonfinite(model: nn.Module, where: Callable[[], str]) -> None:
    """Check every module's output; `where` describes the step and the batch.

    The first output that is not finite raises TrainingError.
    """

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            for one in output if isinstance(output, tuple) else (output,):
                if isinstance(one, Tensor) and not is_finite(one):
                    raise _nonfinite(
                        f"{name or 'the model'} ({type(module).__name__}) gives", one, where()
                    )

        return look

    for name, module in model.named_modules():
        module.register_forward_hook(hook(name))


def check_gradients(model: nn.Module, where: Callable[[], str]) -> None:
    """Raise TrainingError naming the first parameter, going back, whose gradient is not finite."""
    for name, parameter in reversed(list(model.named_parameters())):
        # The Neuron backend's optimizer keeps it, widened to float32, as main_grad.
        gradient = getattr(parameter, "main_grad", parameter.grad)
        if gradient is not None and not is_finite(gradient):
            raise _nonfinite(f"the gradient of {name} has", gradient, where())


def is_finite(x: Tensor) -> bool:
    """Return whether all of a tensor, or of this rank's part of it, is finite."""
    part = x.to_local() if isinstance(x, compat.DTensor) else x
    return bool(torch.isfinite(part).all())


def _nonfinite(what: str, x: Tensor, where: str) -> TrainingError:
    part = x.to_local() if isinstance(x, compat.DTensor) else x
    nans, infinite = int(part.isnan().sum()), int(part.isinf().sum())
    return TrainingError(f"{where}: {what} {nans} NaN and {infinite} Inf", local=True)
