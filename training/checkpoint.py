"""Sharded checkpoints by torch's distributed checkpoint: every rank writes what it owns.

Inside: model, optimizer and the random state of every rank; step, tokens and the place in the data
are in the manifest. The learning rate is a function of the step, so it needs no state.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from training import manifest
from training.errors import RequestError, TrainingError
from training.manifest import Manifest
from training.parallel.group import Group


def save(
    save_path: str,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Group,
    describe: Callable[[dict[str, int]], Manifest],
    keep: int = 0,
    every: int = 0,
) -> Path:
    """Write the checkpoint of a step; it appears under its name only when all of it is on disk.

    A collective call. `describe` makes the manifest from the files' sizes; older checkpoints than
    the newest `keep` are removed, as manifest.retain tells. Raises TrainingError on every rank if
    any could not write its part; then nothing is left behind.
    """
    folder = manifest.temporary(save_path, step)

    def begin() -> None:
        if group.rank == 0:
            with _told(folder):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)

    def end() -> None:
        if group.rank == 0:
            with _told(folder):
                manifest.publish(folder, describe)
                manifest.retain(folder.parent, keep, every)

    group.together(begin)
    with _told(folder):
        dcp.save(
            {**_state(model, optimizer), "random": {f"rank_{group.rank}": _random(group.device)}},
            storage_writer=dcp.FileSystemWriter(folder, sync_files=True),
            process_group=group.control,
        )
    group.together(end)
    return folder.with_name(f"step_{step}_ckp")


def find(
    folders: list[str], group: Group, tell: Callable[[str], None]
) -> tuple[Path, Manifest] | None:
    """Find the newest complete checkpoint of the first folder that has one, for every rank."""
    found = None
    for folder in folders if group.rank == 0 else ():
        found = found or manifest.newest(manifest.checkpoints(folder), tell)
    return group.broadcast(found)


def load(
    path: Path,
    told: Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Group,
    expected: dict[str, Any],
) -> None:
    """Put a checkpoint into model, optimizer and this rank's random state; any number of ranks.

    Raises RequestError listing every field in which the model differs from `expected`.
    """
    differing = [
        f"{name}: {told.model.get(name)!r} in the checkpoint, {expected.get(name)!r} asked for"
        for name in sorted(told.model.keys() | expected.keys())
        if told.model.get(name) != expected.get(name)
    ]
    if differing:
        raise RequestError("\n  - ".join([f"{path} is of another model:", *differing]))
    state = _state(model, optimizer)
    random = _random(group.device)
    if group.rank < told.world_size:
        state["random"] = {f"rank_{group.rank}": random}
    with _told(path, "read"):
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), process_group=group.control)
    for second, first in _tied(model).items():
        state["model"][second] = state["model"][first]
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"], group.device)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Collect model and optimizer by parameter name, a tied parameter once."""
    weights, moments = get_state_dict(model, optimizer)
    for second in _tied(model):
        del weights[second]
    return {"model": weights, "optimizer": moments}


def _tied(model: nn.Module) -> dict[str, str]:
    return getattr(model, "tied", {})


def _random(device: torch.device) -> dict[str, Tensor]:
    """Give the random state of this rank: uint8 tensors."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


class _told:  # noqa: N801  (reads as a word: `with _told(folder)`)
    """Turns what goes wrong while a checkpoint is written or read into one line for the user."""

    def __init__(self, folder: Path, verb: str = "written") -> None:
        self.folder, self.verb = folder, verb

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception | dcp.CheckpointException):
            return
        cause: BaseException = error
        if isinstance(error, dcp.CheckpointException) and error.failures:
            cause = next(iter(error.failures.values()))[0]
        room = ""
        if self.verb == "written":
            # A full disk reaches here as an error of torch's own that does not say so.
            free = shutil.disk_usage(self.folder.parent).free
            room = f" ({free:,} bytes were free there)"
            shutil.rmtree(self.folder, ignore_errors=True)
        first_line = str(cause).strip().partition("\n")[0] or type(cause).__name__
        raise TrainingError(
            f"checkpoint {self.folder} could not be {self.verb}{room}: {first_line}"
        ) from error
