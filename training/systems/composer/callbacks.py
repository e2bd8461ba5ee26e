"""What happens around each step: its learning rate, the clipping of its gradients, an early end."""

from __future__ import annotations

import signal
from dataclasses import asdict
from types import FrameType
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from training.config import lr_schedule
from training.models import Sizes
from training.parallel.optimizer import clip_gradients, set_learning_rate
from training.systems.composer.config import ComposerConfig


class LearningRate(Callback):
    """Sets the rate of each step before it is taken, from the tokens of the run alone.

    Composer's own schedulers are asked before its clock has moved on, so theirs lag a step behind
    the formula; and a resumed run would begin with the rate that its checkpoint was made with.
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
    """Scales a step's gradients so that their global norm is at most a threshold.

    Not Composer's own, which does not tell the norm, and on torch 2.2 adds it up in another order
    in each process, so that a resumed run would differ in the last digits.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.norm: Tensor | None = None  # (), of the last step, before it was scaled

    def after_train_batch(self, state: State, logger: Logger) -> None:
        modules = state.model.modules()
        sharded = next((one for one in modules if isinstance(one, FullyShardedDataParallel)), None)
        self.norm = clip_gradients(sharded or state.model, self.threshold)  # ()


class Described(Callback):
    """Lets each checkpoint tell the sizes of its model, for training.convert."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def state_dict(self) -> dict[str, Any]:
        return {"family": self.sizes.family, "sizes": asdict(self.sizes)}


class Stopping(Callback):
    """Ends the run after a step once any rank has had a SIGTERM or SIGUSR1; Composer then saves."""

    def __init__(self) -> None:
        self._asked = 0
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = 1

    def batch_end(self, state: State, logger: Logger) -> None:
        asked = state.device.tensor_to_device(torch.tensor([self._asked]))  # (1,)
        dist.all_reduce(asked, "MAX")
        if asked.item():
            state.evaluators = []  # there is time to save, and for nothing else
            state.stop_training()
