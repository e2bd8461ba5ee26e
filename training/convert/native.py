"""What training writes: torch's distributed checkpoints, weights alone, and Composer's checkpoints.

A distributed checkpoint is read one parameter at a time, from whatever files its ranks wrote. Only
the model is read, not the optimizer or the random states.

training.mamba_composer lets Composer write one file per checkpoint: ep0-ba40-rank0.pt. Such a file
is a pickle, which could run anything. So only tensors and plain values are made from it; everything
else that Composer keeps (clocks, random states) is skipped.
"""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from training import manifest
from training.convert.config import is_one_of, make, read_table
from training.convert.weights import Found, Weights
from training.errors import RequestError
from training.models import FAMILIES, RopeScaling, Sizes

_PREFIX = "model."
"""Prefix of the parameters' names in what training.checkpoint.dcp saves."""

COMPOSER_LATEST = "latest-rank0.pt"
_COMPOSER_PREFIX = "model.language."
"""Prefix of the parameters' names in training.systems.composer.model."""
_MADE_OF_PICKLES = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_tensor_v2"),
}


def read_sizes(settings: dict[str, Any], where: Path) -> Sizes:
    """Read the sizes of a folder of weights. Raises RequestError listing what is wrong."""
    family, values = settings.get("family"), settings.get("sizes")
    if not is_one_of(family, FAMILIES):
        raise RequestError(
            f"{where}: family {family!r} is not supported (known: {', '.join(FAMILIES)})"
        )
    if not isinstance(values, dict):
        raise RequestError(f"{where}: has no sizes")
    scaling = values.get("rope_scaling")
    if isinstance(scaling, dict):
        try:
            values = {**values, "rope_scaling": RopeScaling.of(scaling)}
        except RequestError as error:
            raise RequestError.of([f"{where}: {fault}" for fault in error.faults]) from error
    return make(str(family), values, where)


def write_sizes(sizes: Sizes) -> dict[str, Any]:
    return {"family": sizes.family, "sizes": asdict(sizes)}


def newest_checkpoint(folder: Path) -> Path:
    """Find a run's newest complete checkpoint. Raises RequestError naming those that are broken."""
    notes: list[str] = []
    found = manifest.newest(manifest.checkpoints(str(folder)), notes.append)
    if found is None:
        raise RequestError("\n".join([f"{folder} has no complete checkpoint", *notes]))
    return found[0]


def read_checkpoint(folder: Path) -> tuple[Sizes, Weights]:
    """Open a checkpoint. Raises RequestError if it is damaged or of no family of ours."""
    found, fault = manifest.read(folder)
    if found is not None:
        fault = manifest.rotten(folder, found)
    if found is None or fault:
        raise RequestError(f"checkpoint {folder} is broken: {fault}")
    where = folder / manifest.NAME
    values = dict(read_table(vars(found), "model", where))
    family = values.pop("family", None)
    return read_sizes({"family": family, "sizes": values}, where), _CheckpointFiles(folder)


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
        # The steps of dcp.load for one rank: dcp.load of torch 2.2 requires a process group, and
        # that of every release reads the table of contents again on each call.
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


def find_composer(path: Path) -> Path | None:
    """Find the checkpoint that a path names, or the newest in a folder; None if there is none.

    Raises RequestError for a checkpoint that is in parts.
    """
    if path.is_dir() and any(path.glob("*.distcp")):
        raise RequestError(
            f"{path} is a checkpoint in parts; fix: let Composer write whole ones, as "
            "training.mamba_composer does (state_dict_type: full)"
        )
    found = path / COMPOSER_LATEST if path.is_dir() else path
    return found if found.suffix == ".pt" and found.is_file() else None


def read_composer(path: Path) -> tuple[Sizes, Weights]:
    """Open a checkpoint. Raises RequestError if it is broken, or not of training.mamba_composer."""
    try:
        held = torch.load(
            str(path),
            map_location="cpu",
            mmap=zipfile.is_zipfile(path),
            weights_only=False,
            pickle_module=SimpleNamespace(
                Unpickler=_Unpickler, load=pickle.load, __name__="pickle"
            ),
        )
        state = held["state"]
        tensors = {
            name.removeprefix(_COMPOSER_PREFIX): value
            for name, value in state["model"].items()
            if name.startswith(_COMPOSER_PREFIX)
        }
        described = state.get("callbacks", {}).get("Described")
    except Exception as error:  # pickle, zip and torch fail in many ways
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RequestError(f"{path} cannot be read as Composer's checkpoint: {reason}") from error
    if not isinstance(described, dict) or not described or not tensors:
        raise RequestError(f"{path} states no sizes: training.mamba_composer has not written it")
    return read_sizes(described, path), _ComposerState(tensors)


class _ComposerState(Weights):
    """The model in a checkpoint of Composer, mapped into memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.found = {n: Found(tuple(t.shape), t.dtype) for n, t in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]  # its own shape


class _PassedOver:
    """Stands in for objects that are not made."""

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return only what tensors are made with; torch itself provides their storages."""
        return (
            super().find_class(module, name) if (module, name) in _MADE_OF_PICKLES else _PassedOver
        )
