"""Our own formats: what training writes (torch's distributed checkpoints), and weights alone.

A checkpoint is read one parameter at a time from whatever files its ranks wrote. Of its content
only the model is read: neither the optimizer nor the random states.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from training import manifest
from training.convert.config import FAMILIES, make, rope_scaling
from training.convert.weights import Found, Weights
from training.errors import RequestError
from training.models import Sizes

_PREFIX = "model."
"""Before the names of parameters, in what training.checkpoint.dcp saves."""


def read(settings: dict[str, Any], where: Path) -> Sizes:
    """Read the sizes of a folder of weights. Raises RequestError listing what is wrong."""
    family, values = settings.get("family"), settings.get("sizes")
    if family not in FAMILIES:
        raise RequestError(
            f"{where}: family {family!r} is not one that we have ({', '.join(FAMILIES)})"
        )
    if not isinstance(values, dict):
        raise RequestError(f"{where}: has no sizes")
    scaling = values.get("rope_scaling")
    if isinstance(scaling, dict):
        values = {**values, "rope_scaling": rope_scaling(scaling, where)}
    return make(str(family), values, where)


def write(sizes: Sizes) -> dict[str, Any]:
    return {"family": sizes.family, "sizes": asdict(sizes)}


def newest(folder: Path) -> Path:
    """Find a run's newest complete checkpoint. Raises RequestError telling what is broken."""
    told: list[str] = []
    found = manifest.newest(manifest.checkpoints(str(folder)), told.append)
    if found is None:
        raise RequestError("\n".join([f"{folder} has no complete checkpoint", *told]))
    return found[0]


def read_checkpoint(folder: Path) -> tuple[Sizes, Weights]:
    """Open a checkpoint. Raises RequestError if it is not sound or of no family of ours."""
    told, fault = manifest.read(folder)
    if told is not None:
        fault = manifest.rotten(folder, told)
    if told is None or fault:
        raise RequestError(f"checkpoint {folder} is broken: {fault}")
    where = folder / manifest.NAME
    values = dict(told.model)
    family = values.pop("family", None)
    return read({"family": family, "sizes": values}, where), _CheckpointFiles(folder)


class _CheckpointFiles(Weights):
    """The model in a distributed checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = dcp.FileSystemReader(folder)
        try:
            self._contents = self._reader.read_metadata()
        except Exception as error:  # pickle fails in many ways
            raise RequestError(f"checkpoint {folder}: .metadata cannot be read: {error}") from error
        self._reader.set_up_storage_reader(self._contents, is_coordinator=True)
        self.found = {
            name.removeprefix(_PREFIX): Found(tuple(value.size), value.properties.dtype)
            for name, value in self._contents.state_dict_metadata.items()
            if name.startswith(_PREFIX) and isinstance(value, TensorStorageMetadata)
        }

    def read(self, name: str) -> Tensor:
        found = self.found[name]
        whole = torch.empty(found.shape, dtype=found.dtype)  # its own shape
        # The steps of dcp.load for one rank: dcp.load of torch 2.2 asks for a process group, and
        # all read the table of contents once more for every call.
        planner, reader = dcp.DefaultLoadPlanner(), self._reader
        try:
            planner.set_up_planner({f"{_PREFIX}{name}": whole}, self._contents, is_coordinator=True)
            plan = reader.prepare_local_plan(planner.create_local_plan())
            (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
            reader.read_data(planner.finish_plan(plan), planner).wait()
        except Exception as error:  # pickle, zip and torch fail in many ways
            raise RequestError(
                f"checkpoint {self._folder}: {name} cannot be read: {str(error).strip()}"
            ) from error
        return whole
