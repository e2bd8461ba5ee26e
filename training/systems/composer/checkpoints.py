"""A run's folder: config.json, Composer's checkpoints, and the repair of their link after a kill.

Composer writes a checkpoint under its own name, removes the link to the newest one, and makes it
again. A run killed in between would start from the beginning, or find a truncated checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training.config import lr_schedule
from training.errors import RequestError, writing
from training.loggers.jsonl import FILE
from training.systems.composer.config import ComposerConfig
from training.trainer.metrics import described

CONFIG = "config.json"
LINK = "latest-rank0.pt"
STATE_BYTES = 12
"""Bytes of a parameter in a checkpoint: its value and AdamW's two moments, float32."""
_NAME = re.compile(r"ep\d+-ba(\d+)-rank0\.pt")


def prepare(
    config: ComposerConfig,
    folder: Path,
    parameters: int,
    world_size: int,
    say: Callable[[str], None],
) -> Path | None:
    """Make and check the folder of a run, and write its config.json; for rank 0 alone.

    Returns the checkpoint that the run is to resume from, or None. Raises RequestError if the
    folder cannot be written or has no room for a checkpoint, if its checkpoints are of another
    model or beyond the run's end, or if it has any although the run is not to resume.
    """
    _require_room(folder, STATE_BYTES * parameters)
    newest = repair(folder)
    if newest and not config.trainer.autoresume:
        raise RequestError(
            f"trainer.save_folder: {folder} has checkpoints, such as {newest.name}; fix: "
            "set trainer.autoresume to true to go on from it, or give another folder"
        )
    if newest:
        _require_same_model(config, folder / CONFIG)
        _require_no_later(config, newest)
        say(f"resuming from {newest}")
    record: dict[str, Any] = {
        "config": asdict(config),
        "world_size": world_size,
        **described(
            config.model.sizes,
            parameters=parameters,
            sequences=config.data.global_batch_size,
            tokens=config.tokens_per_step,
        ),
    }
    with writing(folder / CONFIG):
        (folder / CONFIG).write_text(json.dumps(record, indent=2) + "\n")
    return newest


def repair(folder: Path) -> Path | None:
    """Make the link point to the newest complete checkpoint; return that, or None.

    Raises TrainingError if the folder cannot be written.
    """
    found = checkpoints(folder)
    newest, link = (found[-1] if found else None), folder / LINK
    with writing(link):
        if newest is None:
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or link.readlink() != Path(newest.name):
            made = folder / f".{LINK}.{os.getpid()}"
            made.symlink_to(newest.name)
            made.replace(link)
    return newest


def checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints, oldest first: the end of their files is written last."""
    found = (path for path in folder.glob("*.pt") if _NAME.fullmatch(path.name))
    return sorted((path for path in found if zipfile.is_zipfile(path)), key=_step)


def _step(path: Path) -> int:
    """Read the step of a checkpoint from its name."""
    name = _NAME.fullmatch(path.name)
    assert name is not None
    return int(name[1])


def _require_room(folder: Path, needed: int) -> None:
    """Make the folder; raise RequestError if it cannot be written or has too little room."""
    probe = folder / f".probe.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RequestError(
            f"trainer.save_folder: {folder} cannot be written: {error.strerror}"
        ) from error
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RequestError(
            f"trainer.save_folder: {folder} has {free:,} bytes free, but a checkpoint takes "
            f"{needed:,}"
        )


def _require_no_later(config: ComposerConfig, newest: Path) -> None:
    """Raise RequestError if the run ends before its checkpoint, as Composer would call it done."""
    step = done = _step(newest)
    if lr_schedule.duration(config.scheduler.t_max)[1] == "tok":
        # Earlier steps may have had another number of tokens, and here it is tokens that count.
        done = math.ceil(_tokens(newest.parent, step, config) / config.tokens_per_step)
    if done > config.num_steps:
        raise RequestError(
            f"scheduler.t_max: {config.num_steps} steps are less than the {step} steps of {newest}"
        )


def _tokens(folder: Path, step: int, config: ComposerConfig) -> int:
    """Find the tokens up to a step in the run's records, or assume that all steps are equal."""
    with suppress(OSError, ValueError, KeyError):
        for line in (folder / FILE).read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == "step" and record["step"] == step:
                return int(record["tokens_seen"])
    return step * config.tokens_per_step


def _require_same_model(config: ComposerConfig, path: Path) -> None:
    """Raise RequestError, naming every size, if the folder's run has another model."""
    try:
        before = json.loads(path.read_text())["config"]["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # Composer compares the tensors themselves
    found = [
        f"model.{name}: is {value}, but {before.get(name)} in the checkpoints of {path.parent}"
        for name, value in asdict(config.model).items()
        if name in ("vocab_size", "d_model", "n_layer") and before.get(name) != value
    ]
    if found:
        raise RequestError.of(found)
