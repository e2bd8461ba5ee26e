"""A checkpoint as training writes it, of an untrained model."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch.distributed.checkpoint as dcp

from training import manifest
from training.models.families import identity
from training.models.language import LanguageModel


def write_checkpoint(model: LanguageModel, run: Path, step: int = 1) -> Path:
    """Write the model's weights as a run's checkpoint; returns the checkpoint's folder."""
    folder = manifest.temporary(str(run), step)
    folder.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that there is only one process
        dcp.save(
            {"model": model.state_dict()},
            storage_writer=dcp.FileSystemWriter(str(folder)),
            no_dist=True,
        )
    record = manifest.Manifest(
        step=step,
        tokens_seen=0,
        world_size=1,
        model=identity(model.config),
        data={},
        torch="",
        files={path.name: manifest.File.of(path) for path in folder.iterdir()},
    )
    return manifest.publish(folder, record)
