"""A run, described completely: frozen dataclasses, checked together, written beside the results.

The doors turn their flags into a Config; nothing further down reads a flag. Light: no torch here.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from training.errors import RequestError, writing
from training.models import Sizes
from training.schedule import ScheduleConfig

STRATEGIES = ("fsdp", "hsdp", "ddp")
ENGINES = ("auto", "fsdp1", "fsdp2")
PRECISIONS = ("auto", "bf16", "fp32")
DEVICES = ("auto", "cpu", "cuda")
ON_NAN = ("stop", "skip")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model: its name, and the sizes that the name stands for."""

    name: str
    sizes: Sizes


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read; batch_size counts sequences of one rank that go through the model at once.

    A step takes gradient_accumulation such batches.
    """

    dataset_path: str
    seq_length: int = 4096
    batch_size: int = 2
    gradient_accumulation: int = 1
    eval_dataset_path: str = ""  # held-out data; empty: no evaluation
    eval_batches: int = 10  # at most, of every rank; 0: all that there are


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, and how its learning rate goes."""

    learning_rate: float = 3e-4  # the peak
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    grad_clip_thresh: float = 4.0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is spread, and what is traded for memory."""

    sharding_strategy: str = "fsdp"
    shard_group_size: int = 0  # hsdp: ranks that share one copy of the model; 0 = those of a node
    fsdp_engine: str = "auto"
    low_cpu_fsdp: bool = False
    precision: str = "auto"
    fsdp_activation_checkpointing: bool = False
    selective_checkpointing: int = 1  # recompute every N-th block
    use_torch_compile: bool = False


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long, where to, and what is told on the way."""

    save_ckpt_path: str
    load_ckpt_path: str = ""
    num_steps: int = 2000
    report_interval: int = 200
    checkpoint_interval: int = 20000
    eval_interval: int = 0  # steps; 0: at the end only
    keep_checkpoints: int = 0  # newest ones kept; 0 = all
    keep_every: int = 0  # steps; checkpoints of their multiples are kept too
    seed: int = 2023
    device: str = "auto"
    use_profiler: bool = False
    on_nan: str = "stop"
    trace_nan: bool = False


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run; raises RequestError with all its faults when it is made."""

    model: ModelConfig
    data: DataConfig
    run: RunConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        found = faults(self)
        if found:
            raise RequestError.of(found)


def faults(config: Config) -> list[str]:
    """List what is wrong with a configuration, each fault with the name of its setting."""
    data, optim, parallel, run = config.data, config.optim, config.parallel, config.run
    at_least_one = {
        "seq_length": data.seq_length,
        "batch_size": data.batch_size,
        "gradient_accumulation": data.gradient_accumulation,
        "num_steps": run.num_steps,
        "report_interval": run.report_interval,
        "checkpoint_interval": run.checkpoint_interval,
        "selective_checkpointing": parallel.selective_checkpointing,
    }
    not_negative = {
        "keep_checkpoints": run.keep_checkpoints,
        "keep_every": run.keep_every,
        "eval_interval": run.eval_interval,
        "eval_batches": data.eval_batches,
        "shard_group_size": parallel.shard_group_size,
        "seed": run.seed,
        "weight_decay": optim.weight_decay,
    }
    positive = {"learning_rate": optim.learning_rate, "grad_clip_thresh": optim.grad_clip_thresh}
    one_of = {
        "sharding_strategy": (parallel.sharding_strategy, STRATEGIES),
        "fsdp_engine": (parallel.fsdp_engine, ENGINES),
        "precision": (parallel.precision, PRECISIONS),
        "device": (run.device, DEVICES),
        "on_nan": (run.on_nan, ON_NAN),
    }
    not_empty = {"dataset_path": data.dataset_path, "save_ckpt_path": run.save_ckpt_path}
    found = [f"{n}: must be at least 1, not {v}" for n, v in at_least_one.items() if v < 1]
    found += [f"{n}: must not be negative, is {v}" for n, v in not_negative.items() if not v >= 0]
    found += [
        f"{n}: must be more than 0 and finite, is {v}"
        for n, v in positive.items()
        if not 0 < v < float("inf")
    ]
    found += [
        f"{n}: must be one of {', '.join(known)}, not {v!r}"
        for n, (v, known) in one_of.items()
        if v not in known
    ]
    found += [f"{n}: must be given" for n, v in not_empty.items() if not v]
    if run.keep_every and not run.keep_checkpoints:
        found.append("keep_every: all checkpoints are kept already, as keep_checkpoints is 0")
    if run.eval_interval and not data.eval_dataset_path:
        found.append("eval_interval: there is no eval_dataset_path to evaluate on")
    if parallel.shard_group_size and parallel.sharding_strategy != "hsdp":
        found.append("shard_group_size: only sharding_strategy=hsdp has shard groups")
    return found


def write_resolved(config: Config, folder: Path, world_size: int) -> Path:
    """Write config.json: every setting with its value, and the versions that ran it."""
    record: dict[str, Any] = {
        "config": dataclasses.asdict(config),
        "world_size": world_size,
        "versions": {"python": platform.python_version(), "torch": metadata.version("torch")},
    }
    path = folder / "config.json"
    with writing(path):
        path.write_text(json.dumps(record, indent=2) + "\n")
    return path
