"""Going on from a checkpoint: what must be the same, what may be another and is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from training import manifest
from training.checkpoint import dcp
from training.config.config import Config
from training.data.loader import Prefetcher
from training.errors import RequestError, TrainingError
from training.parallel.backend import Backend
from training.process_group import Group


def resume(
    config: Config,
    group: Group,
    backend: Backend,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Prefetcher,
    say: Callable[[str], None],
) -> tuple[int, int]:
    """Load the newest sound checkpoint, if any; (step, tokens seen) to go on from.

    The save folder comes first: what this run wrote is newer than what it began from. Broken ones
    of it that were passed over are set aside. A collective call. Raises RequestError for a
    checkpoint of another model, or of more steps than asked for, and TrainingError where there are
    checkpoints and none is sound.
    """
    run = config.run
    found, broken = dcp.find(run.checkpoint_folders, group, say)
    if found is None and broken:
        raise TrainingError(
            f"none of the {len(broken)} checkpoints of {' and '.join(run.checkpoint_folders)} is "
            "sound; take them away to begin at step 0"
        )
    if found is None:
        say("no checkpoint found: starting at step 0")
        return 0, 0
    path, told = found
    if told.step > run.num_steps:
        raise RequestError(
            f"num_steps: {run.num_steps} is less than the {told.step} steps of {path}"
        )
    state = backend.state(model, optimizer)
    dcp.load(path, told, state, group, identity(config))
    backend.restore(model, optimizer, state)
    say(f"resumed from {path} at step {told.step}")
    if group.rank == 0:  # else they would count among the newest, which are kept
        for one in broken:
            manifest.set_aside(one, run.save_ckpt_path)
    for change in _changes(told.settings, settings(config)):
        say(f"WARNING: {change}; what was asked for now counts")
    if told.world_size != group.world_size:
        say(f"it was saved by {told.world_size} ranks, now {group.world_size}")
    warning = data.resume(told.data)
    if warning:
        say(f"WARNING: {warning}")
    return told.step, told.tokens_seen


def identity(config: Config) -> dict[str, Any]:
    """Give what must not change between a checkpoint and its resumption."""
    sizes = config.model.sizes
    return {"family": sizes.family, **asdict(sizes)}


def settings(config: Config) -> dict[str, Any]:
    """Give what a resumption may change, but seldom means to."""
    optim = asdict(config.optim)
    rates = optim.pop("schedule")
    return {
        "schedule": rates.pop("name"),
        **rates,
        **optim,
        "num_steps": config.run.num_steps,
        "seed": config.run.seed,
        "gradient_accumulation": config.data.gradient_accumulation,
    }


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List the settings of a checkpoint that are others now, as they are after a JSON file."""
    now = json.loads(json.dumps(now))
    return [
        f"{name}: the checkpoint was made with {before[name]}, this is {value}"
        for name, value in now.items()
        if name in before and before[name] != value
    ]
