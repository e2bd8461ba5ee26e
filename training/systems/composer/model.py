"""Our Mamba as a ComposerModel, and the measurements of an evaluation.

These are loss, perplexity, and how often the target is among the likeliest tokens.

Shapes: b batch size, l length, r rows (b * l), c rows of a chunk, v vocabulary size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from composer.models import ComposerModel
from torch import Tensor, nn
from torchmetrics import Metric

from training import models
from training.models.language import LanguageModel
from training.ops.loss import IGNORED, LOGITS
from training.systems.composer.config import SEED, ComposerConfig
from training.systems.composer.data import Batch
from training.trainer import flops

TOPS = (3, 10)
"""A target is a hit if it is among this many of the likeliest tokens."""


def measure(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over the targets (b, l) that count: their number, their loss, hits for each of TOPS.

    logits (b, l, v) -> (2 + len(TOPS),) in float64; softmax in float32.
    """
    sums = torch.zeros(2 + len(TOPS), dtype=torch.float64, device=logits.device)
    rows, wanted = logits.flatten(0, 1), targets.flatten()  # (r, v), (r,)
    step = max(1, LOGITS // rows.shape[1])
    for at in range(0, len(rows), step):
        t = wanted[at : at + step]  # (c,)
        counts = t != IGNORED  # (c,)
        t = t[counts]  # (c,) of those that count
        part = rows[at : at + step][counts].float()  # (c, v)
        loss = F.cross_entropy(part, t, reduction="sum")  # ()
        above = (part > part.gather(1, t[:, None])).sum(1)  # (c,): tokens that are likelier
        hits = [(above < top).sum() for top in TOPS]  # () each
        sums += torch.stack([counts.sum(), loss, *hits]).double()
    return sums


class _Mean(Metric):
    """The mean of a column of `measure` over all batches and ranks."""

    full_state_update = False
    count: Tensor
    sum: Tensor

    def __init__(self, column: int) -> None:
        super().__init__()
        self.column = column
        zero = torch.zeros((), dtype=torch.float64)  # ()
        self.add_state("count", zero, dist_reduce_fx="sum")
        self.add_state("sum", zero.clone(), dist_reduce_fx="sum")

    def update(self, sums: Tensor) -> None:
        """Add the measurements of a batch, as `measure` returns them."""
        self.count += sums[0]  # ()
        self.sum += sums[self.column]  # ()

    def compute(self) -> Tensor:
        return self.sum / self.count.clamp(min=1)  # ()


class _Perplexity(_Mean):
    def compute(self) -> Tensor:
        return super().compute().exp()  # ()


class _Count(_Mean):
    def compute(self) -> Tensor:
        return self.count  # ()


def metrics() -> dict[str, Metric]:
    """Make the metrics of an evaluation, by name."""
    tops = {f"top{top}": _Mean(column) for column, top in enumerate(TOPS, 2)}
    return {"loss": _Mean(1), "perplexity": _Perplexity(1), **tops, "tokens": _Count(0)}


class Asked:
    """What a loss needs besides inputs; FSDP, which casts a unit's inputs, does not look inside."""

    def __init__(self, batch: Batch) -> None:
        self.targets, self.total = batch["targets"], batch["total"]  # (b, l), ()
        self.weights = batch.get("weights")  # (b, l)


class Unit(nn.Module):
    """The unit that Composer shards as one, except for blocks that are units of their own."""

    def __init__(self, language: LanguageModel) -> None:
        super().__init__()
        self.language = language

    def forward(self, inputs: Tensor, asked: Asked | None = None) -> Tensor:
        """Return the loss () if one is asked for, else logits (b, l, v)."""
        if asked is None:
            return self.language(inputs)  # (b, l, v)
        return self.language(inputs, asked.targets, weights=asked.weights, total=asked.total)  # ()


class MambaModel(ComposerModel):
    """The model of a configuration, with its initial values; they are float32 and stay so.

    sharded: whether Composer's FSDP will shard it, and recompute blocks in its own way.
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
        """Return the loss (), float32, without ever holding all logits."""
        return self.model(batch["inputs"], Asked(batch))  # ()

    def loss(self, outputs: Tensor, batch: Batch, *args: Any, **kwargs: Any) -> Tensor:
        return outputs  # ()

    def eval_forward(self, batch: Batch, outputs: Tensor | None = None) -> Tensor:
        """Measure a batch of held-out data, (4,): see `measure`."""
        return measure(self.model(batch["inputs"]), batch["targets"])  # (4,)

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        return {} if is_train else metrics()

    def update_metric(self, batch: Batch, outputs: Tensor, metric: Metric) -> None:
        metric.update(outputs)

    def flops_per_batch(self, batch: Batch) -> float:
        """Return the operations of a rank's part of a step, for Composer's SpeedMonitor."""
        sizes = self.model.language.config
        return flops.per_token(sizes, self.length) * batch["inputs"].numel()
