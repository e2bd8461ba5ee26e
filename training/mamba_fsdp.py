"""Pre-train Mamba with FSDP: `torchrun ... -m training.mamba_fsdp --model_name=... `.

Runs under torchrun on any number of ranks, or alone under plain python. Exit codes: 0 done, 1 the
run failed, 2 the request was wrong, 85 stopped by SIGTERM after a checkpoint (start it again).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from training.config import (
    DEVICES,
    ENGINES,
    ON_NAN,
    PRECISIONS,
    STRATEGIES,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
)
from training.door import enter, leave
from training.flags import Flag, boolean, integer, number, parse
from training.models import preset
from training.schedule import TAKES, ScheduleConfig

_READ: dict[str, Callable[[str], Any]] = {"float": number, "int": integer, "str": str}
SCHEDULE_FLAGS = tuple(
    Flag(
        one.name,
        _READ[str(one.type)],
        one.default,
        f"of the schedules {', '.join(name for name, takes in TAKES.items() if one.name in takes)}",
    )
    for one in fields(ScheduleConfig)
    if one.name != "name"
)

FLAGS = (
    Flag("model_name", str, "state-spaces/mamba-130m", "which model, by its name"),
    Flag("dataset_path", str, "", "text:GLOB, files read as bytes"),
    Flag("seq_length", integer, 4096, "tokens of a sequence"),
    Flag("batch_size", integer, 2, "sequences of one rank that go through the model at once"),
    Flag("gradient_accumulation", integer, 1, "such batches in one step"),
    Flag("eval_dataset_path", str, "", "held-out data of the same kinds; empty: no evaluation"),
    Flag("eval_batches", integer, 10, "batches of one rank in an evaluation, 0 for all"),
    Flag("eval_interval", integer, 0, "steps between evaluations; 0: at the end only"),
    Flag("num_steps", integer, 2000, "steps of the whole run"),
    Flag("learning_rate", number, 3e-4, "peak, after the warm-up"),
    Flag("schedule", str, "quadratic-cosine", f"of the learning rate: {', '.join(TAKES)}"),
    *SCHEDULE_FLAGS,
    Flag("grad_clip_thresh", number, 4.0, "largest global norm of the gradients"),
    Flag("weight_decay", number, 0.1, "AdamW's; not for A_log, D, biases and norms"),
    Flag("seed", integer, 2023, "of the initial weights and the order of the data"),
    Flag(
        "save_ckpt_path",
        str,
        "",
        "folder of the results; its newest checkpoint is resumed from",
        ("ckpt_save_path",),
    ),
    Flag(
        "load_ckpt_path",
        str,
        "",
        "folder to start from while save_ckpt_path has no checkpoint",
        ("ckpt_load_path",),
    ),
    Flag(
        "checkpoint_interval", integer, 20000, "steps between checkpoints; one is saved at the end"
    ),
    Flag("keep_checkpoints", integer, 0, "newest checkpoints to keep, 0 for all"),
    Flag("keep_every", integer, 0, "with that: keep those of every so many steps too"),
    Flag("report_interval", integer, 200, "steps between lines of the log"),
    Flag("sharding_strategy", str, "fsdp", f"{', '.join(STRATEGIES)} (ddp: none)"),
    Flag("shard_group_size", integer, 0, "hsdp: ranks that share a copy; 0 for those of a node"),
    Flag("fsdp_engine", str, "auto", f"{', '.join(ENGINES)}; auto: fsdp2 where torch has it"),
    Flag("low_cpu_fsdp", boolean, False, "start on the meta device: no rank holds the whole model"),
    Flag("fsdp_activation_checkpointing", boolean, False, "recompute blocks in the backward pass"),
    Flag("selective_checkpointing", integer, 1, "recompute every N-th block only"),
    Flag("precision", str, "auto", f"{', '.join(PRECISIONS)}; auto: bf16 on a GPU that has it"),
    Flag("device", str, "auto", f"{', '.join(DEVICES)}"),
    Flag("use_torch_compile", boolean, False, "compile the blocks"),
    Flag(
        "on_nan",
        str,
        "stop",
        f"{', '.join(ON_NAN)}: what a loss or gradient that is no number makes of the run or step",
    ),
    Flag("trace_nan", boolean, False, "name the module that gives one, and the samples; slow"),
    Flag("use_profiler", boolean, False, "trace steps 4 to 6 into save_ckpt_path/profile_traces"),
)


def configure(arguments: Sequence[str]) -> Config:
    """Turn the command line into a configuration. Raises RequestError listing the faults."""
    given = parse(FLAGS, arguments, program="python -m training.mamba_fsdp", about=str(__doc__))
    return Config(
        model=ModelConfig(name=given["model_name"], sizes=preset(given["model_name"])),
        data=DataConfig(**_pick(given, DataConfig)),
        optim=OptimConfig(
            schedule=ScheduleConfig(name=given.pop("schedule"), **_pick(given, ScheduleConfig)),
            **_pick(given, OptimConfig),
        ),
        parallel=ParallelConfig(**_pick(given, ParallelConfig)),
        run=RunConfig(**_pick(given, RunConfig)),
    )


def _pick(given: dict[str, Any], section: type) -> dict[str, Any]:
    """Choose the flags that are settings of a section of the configuration."""
    names: dict[str, Any] = section.__dataclass_fields__  # type: ignore[attr-defined]
    return {name: value for name, value in given.items() if name in names}


if __name__ == "__main__":
    leave(enter(configure, sys.argv[1:]))
