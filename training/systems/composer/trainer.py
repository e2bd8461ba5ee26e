"""A run: all its parts, assembled and given to Composer's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from composer import Trainer
from composer.callbacks import SpeedMonitor
from composer.utils import dist

from training import models
from training.checkpoint.lease import NO_LEASE, OwnLease, RunLease
from training.config import lr_schedule
from training.errors import SAVED, RequestError, TrainingError
from training.loggers import Logger, open_wandb_of_environment
from training.loggers.console import Console
from training.observers.stop_request import StopRequest
from training.parallel.memory import compute_dtype
from training.systems.composer import checkpoints as folders
from training.systems.composer.callbacks import Clipping, Described, LearningRate, Records, Stopping
from training.systems.composer.config import SEED, ComposerConfig, check_ranks, fsdp_settings
from training.systems.composer.data import held_out, training_data
from training.systems.composer.model import MambaModel
from training.trainer import flops
from training.trainer.metrics import device_name

T = TypeVar("T")


def run(config: ComposerConfig) -> int:
    """Train to the end; return the exit code. Raises RequestError and TrainingError."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", dist.get_local_rank()) if on_gpu else torch.device("cpu")
    world_size = dist.get_world_size()
    check_ranks(config, world_size)
    if world_size > 1:
        dist.initialize_dist("gpu" if on_gpu else "cpu")
    console = Console()

    def say(text: str) -> None:
        if dist.get_global_rank() == 0:
            console.say(text)

    parameters = models.parameters(config.model.sizes)
    name = config.run_name(parameters)
    folder = config.folder(name)
    say(f"{name}: {parameters:,} parameters, {config.num_steps:,} steps")
    data = _together(lambda: (training_data(config, say), held_out(config, say)))
    if len(set(dist.all_gather_object(data[0].dataloader.dataset.fingerprint))) > 1:
        raise RequestError("data: the ranks see different files")
    is_first = dist.get_global_rank() == 0
    with OwnLease(folder) if is_first else NO_LEASE as lease:
        _together(lambda: lease.take(say))
        prepare = partial(folders.prepare, config, folder, parameters, world_size, say)
        newest = dist.all_gather_object(_together(lambda: prepare() if is_first else None))[0]
        step, is_done = _train(config, folder, newest, data, device, console, lease)
    if not is_done:
        say(f"asked to stop after step {step}: saved; start it again to go on")
        return SAVED
    say(f"done: {step:,} steps; python -m training.generate {folder} --prompt=...")
    return 0


def _train(
    config: ComposerConfig,
    folder: Path,
    newest: Path | None,
    data: tuple[Any, Any],
    device: torch.device,
    console: Console,
    lease: RunLease,
) -> tuple[int, bool]:
    """Train on data that is open, in a folder that is prepared, from its newest checkpoint.

    Returns the last step taken, and whether the run is at its end, which it is not if it was asked
    to stop. Raises TrainingError.
    """

    def say(text: str) -> None:
        if dist.get_global_rank() == 0:
            console.say(text)

    name = config.run_name(models.parameters(config.model.sizes))
    loggers = _together(lambda: _wandb(config, folder, name, console))
    clipping, rate = Clipping(config.general.clipping_threshold), LearningRate(config)
    records = Records(config, folder, rate, clipping, console, device, loggers, lease)
    speed = SpeedMonitor(
        window_size=config.general.window_size,
        gpu_flops_available=flops.peak(device_name(device)) or 0,  # 0: Composer must not guess
    )
    stopping = Stopping(StopRequest(lease.release, dist.get_global_rank()))
    trainer = Trainer(
        **_model(config, device, say),
        **_how_long(config, evaluates=bool(data[1])),
        train_dataloader=data[0],
        eval_dataloader=data[1] or None,
        device_train_microbatch_size=config.data.micro_batch_size,
        callbacks=[rate, clipping, Described(config.model.sizes), speed, stopping],
        loggers=[records],
        auto_log_hparams=config.trainer.auto_log_hparams,
        progress_bar=False,
        run_name=name,
        save_folder=str(folder),
        save_overwrite=True,  # leftovers of a kill; folders.prepare looks for anything else
        # Not by autoresume, with which all nodes make and remove the same file in save_folder.
        load_path=str(newest) if newest else None,
        seed=SEED,
    )
    if newest and dist.get_global_rank() == 0:
        # Composer itself removes only checkpoints that the same process has saved.
        trainer.saved_checkpoints[:0] = [str(path) for path in folders.checkpoints(folder)]
    state, end = trainer.state, trainer.state.max_duration  # which a stop brings forward
    try:
        _fit(trainer)
        return int(state.timestamp.batch), bool(state.timestamp >= end)
    finally:
        trainer.close()


def _fit(trainer: Trainer) -> None:
    """Train for the rest of the run. Raises TrainingError."""
    if trainer.state.timestamp >= trainer.state.max_duration:
        return  # an error to Composer
    try:
        trainer.fit()
    except TrainingError as error:
        text = str(error)
        if text.startswith("Caught "):  # by a process that reads ahead; has its traceback too
            raise TrainingError(text.rpartition("Error: ")[2].strip(), local=True) from error
        raise


def _model(config: ComposerConfig, device: torch.device, say: Callable[[str], None]) -> Any:
    """Return the model, its optimizer, and how they are spread, as arguments of Trainer."""
    sharded = device.type == "cuda"
    model = MambaModel(config, sharded=sharded)
    asked = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=asked.lr,
        betas=(asked.beta1, asked.beta2),
        weight_decay=asked.weight_decay,
    )
    found: dict[str, Any] = {"model": model, "optimizers": optimizer}
    # Composer casts nothing: fsdp_settings sets the precision of the computation.
    found |= {"precision": "fp32", "device": "gpu" if sharded else "cpu"}
    if not sharded:
        say("fsdp: left out: Composer shards on GPUs only, so every rank holds the whole model")
        return found
    settings = fsdp_settings(
        config.fsdp,
        bf16=compute_dtype("auto", device) == torch.bfloat16,
        world_size=dist.get_world_size(),
        local_world_size=dist.get_local_world_size(),
    )
    found["parallelism_config"] = {"fsdp": settings}
    return {**found, "python_log_level": "info" if config.fsdp.verbose else None}


def _how_long(config: ComposerConfig, *, evaluates: bool) -> dict[str, Any]:
    """Return when the run ends and what happens on the way, as arguments of Trainer."""
    value, unit = lr_schedule.duration(config.scheduler.t_max)
    asked = config.trainer
    found: dict[str, Any] = {
        "max_duration": f"{int(value)}{unit}",
        "save_interval": asked.save_interval,
        "save_num_checkpoints_to_keep": asked.save_num_checkpoints_to_keep,
    }
    if evaluates:
        found["eval_interval"] = asked.eval_interval
        found["eval_subset_num_batches"] = asked.eval_subset_num_batches
    return found


def _wandb(config: ComposerConfig, folder: Path, name: str, console: Console) -> list[Logger]:
    """Open Weights & Biases on rank 0, if the environment asks for it and it is available.

    Composer's logger is not used: it does not continue the run that it began, and its older
    releases fail with current wandb.
    """
    if dist.get_global_rank():
        return []
    project = config.general.project_name
    return open_wandb_of_environment(folder, asdict(config), console, project=project, name=name)


def _together(work: Callable[[], T]) -> T:
    """Do a rank's work; if it fails on any rank, all ranks raise the first one's error."""
    result, failed = [], None
    try:
        result.append(work())
    except TrainingError as error:
        failed = error
    errors = [error for error in dist.all_gather_object(failed) if error is not None]
    if errors:
        raise errors[0]
    return result[0]
