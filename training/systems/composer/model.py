"""Our Mamba as a ComposerModel.

Shapes: b batch size, l length, v vocabulary size.
"""

from __future__ import annotations

from typing import Any

import torch
from composer.models import ComposerModel
from torch import Tensor, nn
from torchmetrics import Metric

from training import models
from training.models.language import LanguageModel
from training.systems.composer.batch import Batch
from training.systems.composer.config import SEED, ComposerConfig
from training.systems.composer.metrics import measure, metrics
from training.trainer import flops


class Asked:
    """What a loss is asked for with; FSDP, which casts a unit's inputs, does not look inside."""

    def __init__(self, batch: Batch) -> None:
        self.targets, self.total = batch["targets"], batch["total"]  # (b, l), ()
        self.weights = batch.get("weights")  # (b, l)


class Unit(nn.Module):
    """What Composer shards as one, but for the blocks that are units of their own."""

    def __init__(self, language: LanguageModel) -> None:
        super().__init__()
        self.language = language

    def forward(self, inputs: Tensor, asked: Asked | None = None) -> Tensor:
        """Loss () if one is asked for, else logits (b, l, v)."""
        if asked is None:
            return self.language(inputs)  # (b, l, v)
        return self.language(inputs, asked.targets, weights=asked.weights, total=asked.total)  # ()


class MambaModel(ComposerModel):
    """The model of a configuration, with its first values; they are float32 and stay so.

    sharded: whether Composer's FSDP will cut it, and recompute blocks its own way.
    """

    def __init__(self, config: ComposerConfig, *, sharded: bool) -> None:
        super().__init__()
        self.length = config.data.seq_len
        language = models.build(config.model.sizes)
        recompute = config.model.activation_checkpointing and config.fsdp.activation_checkpointing
        for block in language.blocks:
            # The names that Composer's FSDP looks for.
            block._fsdp_wrap = config.model.fsdp_layer_wrap  # type: ignore[assignment]
            block._activation_checkpointing = recompute  # type: ignore[assignment]
            block.recompute = recompute and not sharded
        with torch.no_grad():
            for name, parameter in language.named_parameters():
                parameter.copy_(language.initial(name, parameter.shape, SEED))  # its own shape
        self.model = Unit(language)

    def forward(self, batch: Batch) -> Tensor:
        """Give the loss (), float32, without ever holding all logits."""
        return self.model(batch["inputs"], Asked(batch))  # ()

    def loss(self, outputs: Tensor, batch: Batch, *args: Any, **kwargs: Any) -> Tensor:
        return outputs  # ()

    def eval_forward(self, batch: Batch, outputs: Tensor | None = None) -> Tensor:
        """Measure a batch of held-out data, (4,): see training.systems.composer.metrics."""
        return measure(self.model(batch["inputs"]), batch["targets"])  # (4,)

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        return {} if is_train else metrics()

    def update_metric(self, batch: Batch, outputs: Tensor, metric: Metric) -> None:
        metric.update(outputs)

    def flops_per_batch(self, batch: Batch) -> float:
        """Operations of a step on a rank's part of it, for Composer's SpeedMonitor."""
        sizes = self.model.language.config
        return flops.per_token(sizes, self.length) * batch["inputs"].numel()
