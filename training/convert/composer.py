"""Checkpoints that training.mamba_composer lets Composer write, a file each: ep0-ba40-rank0.pt.

Such a file is a pickle, which could run anything. Only tensors and plain values are made of it; all
else that Composer keeps (clocks, random states) is passed over.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from training.convert import native
from training.convert.weights import Found, Weights
from training.errors import RequestError
from training.models import Sizes

LATEST = "latest-rank0.pt"
_PREFIX = "model.language."
"""Before the names of parameters, in what training.systems.composer.model has."""
_MADE = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_tensor_v2"),
}


def find(path: Path) -> Path | None:
    """Find the checkpoint that a path is, or the newest in a folder; None where there is none.

    Raises RequestError for a checkpoint that is in parts.
    """
    if path.is_dir() and any(path.glob("*.distcp")):
        raise RequestError(
            f"{path} is a checkpoint in parts; let Composer write whole ones, as "
            "training.mamba_composer does (state_dict_type: full)"
        )
    found = path / LATEST if path.is_dir() else path
    return found if found.suffix == ".pt" and found.is_file() else None


def read(path: Path) -> tuple[Sizes, Weights]:
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
            name.removeprefix(_PREFIX): value
            for name, value in state["model"].items()
            if name.startswith(_PREFIX)
        }
    except Exception as error:  # pickle, zip and torch fail in many ways
        told = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RequestError(f"{path} cannot be read as Composer's checkpoint: {told}") from error
    described = state.get("callbacks", {}).get("Described")
    if not described or not tensors:
        raise RequestError(f"{path} tells no sizes: training.mamba_composer has not written it")
    return native.read(described, path), _State(tensors)


class _State(Weights):
    """The model in a checkpoint, mapped into memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.found = {n: Found(tuple(t.shape), t.dtype) for n, t in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]  # its own shape


class _PassedOver:
    """Stands for what is not made."""

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Give what tensors are made with; torch itself gives their storages."""
        return super().find_class(module, name) if (module, name) in _MADE else _PassedOver
