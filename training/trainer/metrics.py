"""What a run reports; training.loggers writes it to the log, to files and to servers.

training.loggers.records lists the records and their fields.

SAVE/config.json records what ran: every setting, the model's size, the batch of a step, the image
and the versions.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import resource
import sys
import time
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.config.config import Config
from training.errors import TrainingError, writing
from training.job.job_log import describe_image
from training.loggers import Logger
from training.loggers.base import Record
from training.models import Sizes
from training.process_group import Group
from training.trainer import flops

PACKAGES = (
    *("torch", "triton", "mamba-ssm", "causal-conv1d", "flash-attn", "numpy"),
    *("safetensors", "datasets", "tokenizers", "transformers", "mosaicml"),
)
"""Packages that a run's losses and speed may depend on, if they are installed."""


class Metrics:
    """Collects steps without making the device wait, and reports them when `flush` is called.

    A context manager: its loggers are closed at the end.
    """

    def __init__(
        self,
        loggers: list[Logger],
        group: Group,
        *,
        tokens_per_step: int,
        seq_length: int,
        parameters: int,
        operations_per_token: float,
        may_skip: bool = False,
    ) -> None:
        self.loggers, self.group, self.tokens_per_step = loggers, group, tokens_per_step
        self.seq_length, self.parameters = seq_length, parameters
        self.operations_per_token, self.may_skip = operations_per_token, may_skip
        self._pending: list[tuple[int, Tensor, Tensor, float, int]] = []
        self._interval: list[Record] = []
        self._since = time.perf_counter()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        with ExitStack() as last:  # close all, even if one cannot write what is left
            for logger in self.loggers:
                last.callback(logger.close, kind is not None)

    def add(
        self, step: int, loss: Tensor, grad_norm: Tensor, learning_rate: float, tokens_seen: int
    ) -> None:
        """Note a step: its loss () on this rank and its gradient norm (), read later."""
        self._pending.append((step, loss, grad_norm, learning_rate, tokens_seen))
        for logger in self.loggers:
            logger.step()

    def flush(self) -> None:
        """Report the steps noted since the last call (a collective call).

        Raises TrainingError, on every rank, naming the first step whose loss or gradient norm is
        not finite, unless such steps are left out. The steps before it are still written.
        """
        if not self._pending:
            return
        losses = torch.stack([loss.float() for _, loss, *_ in self._pending])  # (steps,)
        dist.all_reduce(losses)
        losses /= self.group.world_size  # (steps,)
        norms = torch.stack([norm.float() for _, _, norm, *_ in self._pending])  # (steps,)
        records: list[Record] = [
            {
                "kind": "step",
                "step": step,
                "loss": loss,
                "grad_norm": norm,
                "learning_rate": rate,
                "tokens_seen": tokens,
            }
            for (step, _, _, rate, tokens), loss, norm in zip(
                self._pending, losses.tolist(), norms.tolist(), strict=True
            )
        ]
        self._pending.clear()
        for place, record in enumerate(records):
            lost = [what for what in ("loss", "grad_norm") if not math.isfinite(record[what])]
            if lost and not self.may_skip:
                self._tell(records[:place])
                raise _stopped_by(record["step"], lost[0], record[lost[0]])
            if lost:
                record |= {"loss": None, "grad_norm": None, "skipped": True}
        self._interval += records
        self._tell(records)

    def report(self, waited: float) -> None:
        """Report the means since the last report, in which this rank `waited` seconds for data.

        A collective call.
        """
        self.flush()
        wait = torch.tensor(waited, device=self.group.device)  # ()
        dist.all_reduce(wait, op=dist.ReduceOp.MAX)
        now, count, last = time.perf_counter(), len(self._interval), self._interval[-1]
        tokens = count * self.tokens_per_step / self.group.world_size
        rate = tokens / (now - self._since)
        peak = flops.peak(device_name(self.group.device))
        report = {
            "kind": "report",
            "step": last["step"],
            **{what: self._mean(what) for what in ("loss", "grad_norm")},
            **{what: last[what] for what in ("learning_rate", "tokens_seen")},
            "tokens_per_second_per_device": rate,
            "tokens_per_second": rate * self.group.world_size,
            "seconds_per_step": (now - self._since) / count,
            "samples_per_second": rate * self.group.world_size / self.seq_length,
            "tflops": flops.model_tflops(self.parameters, rate),
            "mfu": None if peak is None else rate * self.operations_per_token / peak,
            "memory_bytes": peak_memory(self.group.device),
            "data_wait": wait.item() / (now - self._since),
        }
        self._interval, self._since = [], now
        self._tell([report])

    def _mean(self, what: str) -> float | None:
        """Return the mean over an interval's steps, without those that were left out."""
        values = [step[what] for step in self._interval if step[what] is not None]
        return math.fsum(values) / len(values) if values else None

    def evaluated(self, step: int, loss: float, tokens: int) -> None:
        """Report the result of an evaluation; the loss over no tokens is unknown.

        Raises TrainingError as `flush` does: a step with a finite loss may still break the weights.
        """
        is_lost = not math.isfinite(loss)
        if is_lost and not self.may_skip:
            raise _stopped_by(step, "evaluation loss", loss)
        is_lost |= tokens == 0
        record = {
            "kind": "evaluation",
            "step": step,
            "loss": None if is_lost else loss,
            # exp overflows soon after 700.
            "perplexity": None if is_lost else math.exp(min(loss, 700.0)),
            "tokens": tokens,
        }
        self._tell([record])

    def saved(self, step: int, seconds: float, waited: float) -> None:
        """Report a complete checkpoint."""
        self._tell([{"kind": "save", "step": step, "seconds": seconds, "waited": waited}])

    def pause(self, seconds: float) -> None:
        """Exclude seconds that were not spent on training from the interval."""
        self._since += seconds

    def _tell(self, records: list[Record]) -> None:
        for logger in self.loggers:
            logger.write(records)


def _stopped_by(step: int, what: str, value: float) -> TrainingError:
    return TrainingError(
        f"step {step}: {what} is {value}; the run stops here, and no checkpoint has been written "
        "since; fix: try a lower learning_rate or grad_clip_thresh (trace_nan=True names where it "
        "comes from, on_nan=skip goes on)"
    )


def device_name(device: torch.device) -> str:
    """Return the name that a device's maker gave it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: reserved on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def write_resolved(
    config: Config, folder: Path, world_size: int, *, parameters: int, tokens_per_step: int
) -> Path:
    """Write config.json: every setting with its value, and what ran it."""
    record: dict[str, Any] = {
        "config": dataclasses.asdict(config),
        "world_size": world_size,
        **described(
            config.model.sizes,
            parameters=parameters,
            sequences=tokens_per_step // config.data.seq_length,
            tokens=tokens_per_step,
        ),
    }
    path = folder / "config.json"
    with writing(path):
        path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def described(
    sizes: Sizes, *, parameters: int, sequences: int, tokens: int
) -> dict[str, dict[str, Any]]:
    """Describe what settings alone do not: the model's size, the batch of a step, what ran it.

    sequences and tokens: of a step over all ranks. `image` is empty outside of our images.
    """
    return {
        "model": {"family": sizes.family, "parameters": parameters},
        "batch": {"sequences": sequences, "tokens": tokens},
        "image": describe_image(os.environ),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of what a run's losses and speed may depend on."""
    found = {name: _version(name) for name in PACKAGES}
    return {
        "python": platform.python_version(),
        **{name: version for name, version in found.items() if version},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
