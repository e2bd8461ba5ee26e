"""A rank's part of a replay: a few steps from a run's newest checkpoint, with bit-exact results.

Started by training.job.replay, on one node alone. The run's own folder is only read: nothing is
saved, and no logger is opened. Each rank takes one batch per step, so that steps are short; their
results can be compared with another node's, but not with the run's own losses.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from training import compat, manifest
from training.config.config import Config, RunConfig
from training.config.lr_schedule import ScheduleConfig
from training.errors import RequestError
from training.parallel.backend import find_backend
from training.trainer.run import set_up

KEPT = ("num_steps", "seed", "same_seed", "device", "on_nan", "hang_seconds", "hang_abort_seconds")
"""Settings that a replay takes from its run; the others are about saving and reporting."""


def replayed(config: Config, scratch: str) -> Config:
    """Return the configuration of a replay: the run's own, but writing only to `scratch`."""
    run = config.run
    start = next((one for one in run.checkpoint_folders if manifest.candidates(one)), "")
    kept = {name: getattr(run, name) for name in KEPT}
    data = replace(
        config.data,
        global_batch=0,
        gradient_accumulation=1,
        eval_dataset_path="",
        eval_batch_size=0,
    )
    # A schedule in tokens might not fit so few steps; any rates do if they are equal on all nodes.
    schedule = ScheduleConfig(name="constant", min_lr=0.0, warmup=0.0)
    return replace(
        config,
        data=data,
        optim=replace(config.optim, schedule=schedule),
        run=RunConfig(
            **kept,
            save_ckpt_path=scratch,
            load_ckpt_path=start,
            async_checkpoint=False,
            checkpoint_in_memory=False,
            progress=False,
        ),
    )


def replay(config: Config, steps: int, output: Path) -> int:
    """Take so many steps, fewer at the end of the run or data; rank 0 writes the results.

    A collective call. The file contains `step`, the last one of the checkpoint; `steps`, for each
    step the losses of all ranks and the norm of the gradients, as hexadecimal numbers; `weights`, a
    digest of the weights at the end.
    """
    group = find_backend(config.parallel.backend).start(config)
    trainer = set_up(config, group)
    began = trainer.step
    given: list[dict[str, Any]] = []
    try:
        with trainer.phase:  # so that the watch ends a rank that hangs
            while len(given) < steps and trainer.step < config.run.num_steps:
                if config.data.epochs and not group.any(not trainer.data.ended()):
                    break
                with trainer.phase("step"):
                    taken = trainer.train_step.take(trainer.step + 1, trainer.tokens_seen)
                    trainer.step += 1
                losses = group.gather(float(taken.loss).hex())
                given.append({"losses": losses, "norm": float(taken.grad_norm).hex()})
            parts = group.gather(digest(trainer.model))
    finally:
        trainer.data.close()
    if group.rank == 0:
        if not given:
            raise RequestError(f"epochs: the checkpoint is of step {began}, the last one")
        whole = hashlib.blake2b("".join(parts or []).encode(), digest_size=16).hexdigest()
        output.write_text(json.dumps({"step": began, "steps": given, "weights": whole}))
    return 0


def digest(model: nn.Module) -> str:
    """Return a digest of this rank's part of all weights."""
    found = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        part: Any = parameter.detach()
        part = part.to_local() if isinstance(part, compat.DTensor) else part
        found.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()
