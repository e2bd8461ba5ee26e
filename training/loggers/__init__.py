"""Where the records of a run go: its file, the log, TensorBoard, Weights & Biases, a bar.

A record is a line of metrics.jsonl (training/trainer/metrics.py lists the kinds). Only rank 0 has
loggers.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from training.config.config import Config, RunConfig
from training.errors import RequestError
from training.loggers.base import FaultTolerantLogger, Logger
from training.loggers.console import Console
from training.loggers.jsonl import FILE, JsonLines
from training.loggers.text import AverageSpeed, ProgressBar, TextLogger

__all__ = ["Logger", "check", "open_loggers"]


def check(run: RunConfig) -> None:
    """Find out early whether what was asked for can be had.

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
            faults.append(f"{setting}: pip install {package}, which is missing here ({error})")
    if faults:
        raise RequestError.of(faults)


def open_loggers(config: Config, start: int, console: Console) -> list[Logger]:
    """Open all that a run asks for, to go on after step `start`.

    What a logger holds of later steps is removed. Raises RequestError where one cannot be opened;
    one that cannot be written later ends nothing.
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


def _load(module: str) -> Any:
    """Import a logger that takes a package which not every image has."""
    return importlib.import_module(f"training.loggers.{module}")
