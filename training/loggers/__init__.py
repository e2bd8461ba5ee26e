"""Where the records of a run go: its file, the log, TensorBoard, Weights & Biases, a progress bar.

A record is a line of metrics.jsonl (training/loggers/records.py lists the kinds). Only rank 0 has
loggers.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from training.config.config import Config, RunConfig
from training.errors import RequestError
from training.loggers.base import FaultTolerantLogger, Logger
from training.loggers.console import Console
from training.loggers.jsonl import FILE, JsonLines
from training.loggers.text import AverageSpeed, ProgressBar, TextLogger

__all__ = ["Logger", "check", "open_loggers", "open_wandb_of_environment"]


def check(run: RunConfig) -> None:
    """Check early that the loggers asked for are available.

    Raises RequestError listing the packages that are not installed.
    """
    faults = []
    for wanted, setting, module, package in (
        (run.tensorboard_dir, "tensorboard_dir", "tensorboard", "tensorboard"),
        (run.use_wandb, "use_wandb", "wandb", "wandb"),
    ):
        try:
            if wanted:
                _load(module)
        except ImportError as error:
            faults.append(
                f"{setting}: {package} cannot be imported here ({error}); fix: pip install "
                f"{package}"
            )
    if faults:
        raise RequestError.of(faults)


def open_loggers(config: Config, start: int, console: Console) -> list[Logger]:
    """Open all loggers that a run asks for, to go on after step `start`.

    What a logger holds of later steps is removed. Raises RequestError if one cannot be opened; one
    that cannot be written later does not end the run.
    """
    run = config.run
    lines = JsonLines(Path(run.save_ckpt_path), start)
    opened: list[Logger] = [
        FaultTolerantLogger(lines, FILE, console),
        TextLogger(
            run.num_steps, console, may_end_early=bool(config.data.epochs) or run.compile_only
        ),
    ]
    if run.average_interval:
        opened.append(AverageSpeed(run.average_interval, start, console))
    if run.tensorboard_dir:
        folder = Path(run.tensorboard_dir)
        curves = _load("tensorboard").TensorBoard(folder, start, run.tensorboard_tags)
        opened.append(FaultTolerantLogger(curves, "TensorBoard", console))
    if run.use_wandb:
        server = _load("wandb").open_run(config)
        opened.append(FaultTolerantLogger(server, "Weights & Biases", console))
    if run.progress and console.show_bar(start, run.num_steps):
        opened.append(ProgressBar(console))
    return opened


def open_wandb_of_environment(
    folder: Path, settings: dict[str, Any], console: Console, *, project: str, name: str
) -> list[Logger]:
    """Open Weights & Biases if WANDB_API_KEY or WANDB_MODE is in the environment.

    A key there may be meant for other programs, so a missing library or a server that refuses or
    does not answer leads to a warning and no logger.
    """
    mode = os.environ.get("WANDB_MODE", "")
    if mode == "disabled" or not (mode or "WANDB_API_KEY" in os.environ):
        return []
    try:
        begin = _load("wandb").begin
        opened = begin(folder, settings, project=project, name=name, dir=str(folder))
    except Exception as error:  # from a library, a network, a disk: none is worth the run
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ImportError):
            reason = f"wandb cannot be imported here ({reason}); fix: pip install wandb"
        console.say(
            "WARNING: Weights & Biases is left out, though WANDB_API_KEY or WANDB_MODE is in the "
            f"environment: {reason.removeprefix('use_wandb: ')}; WANDB_MODE=disabled leaves it out "
            "without this warning",
            sys.stderr,
        )
        return []
    return [FaultTolerantLogger(opened, "Weights & Biases", console)]


def _load(module: str) -> Any:
    """Import a logger that needs a package which not every image has."""
    return importlib.import_module(f"training.loggers.{module}")
