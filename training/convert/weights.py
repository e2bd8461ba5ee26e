"""Tensors of a folder's files, read one at a time: safetensors or torch's own, whole or sharded."""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from training.convert.config import read_json
from training.errors import RequestError

SAFETENSORS = "model.safetensors"
TORCH = "pytorch_model.bin"
INDEX = ".index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Names in a safetensors file -> the dtypes that weights have."""

_DERIVED = re.compile(r".*\.(rotary_emb\.inv_freq|attention\.bias|attention\.masked_bias)")
"""What old releases stored beside the weights, although models make it from their sizes."""


@dataclass(frozen=True)
class Found:
    """What is known about a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Weights:
    """Tensors by name; `found` describes all of them without reading any."""

    found: dict[str, Found]

    def read(self, name: str) -> Tensor:
        """Read one tensor; it may be a view of the file. Raises RequestError if it cannot."""
        raise NotImplementedError


class SafetensorsFiles(Weights):
    """Safetensors files, mapped into memory."""

    def __init__(self, paths: list[Path]) -> None:
        self.found = {}
        self._file: dict[str, Any] = {}
        faults = []
        for path in paths:
            try:
                # Stays open: it is only a mapping of the file.
                file = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise RequestError(f"{path} cannot be read: {_first_line(error)}") from error
            for name in file.keys():  # noqa: SIM118  (it is no dict)
                if _DERIVED.fullmatch(name):
                    continue
                part = file.get_slice(name)
                word = part.get_dtype()
                if word not in _DTYPES:
                    faults.append(f"{path}: {name} is {word}; weights are {', '.join(_DTYPES)}")
                    continue
                self.found[name] = Found(tuple(part.get_shape()), _DTYPES[word])
                self._file[name] = file
        if faults:
            raise RequestError.of(faults)

    def read(self, name: str) -> Tensor:
        return self._file[name].get_tensor(name)  # its own shape


class Held(Weights):
    """Tensors that are in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.found = {n: Found(tuple(t.shape), t.dtype) for n, t in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]  # its own shape


class TorchFiles(Held):
    """Files of torch.save that hold a state dict, mapped into memory if they are zip files."""

    def __init__(self, paths: list[Path]) -> None:
        tensors: dict[str, Tensor] = {}
        faults = []
        for path in paths:
            try:
                held = torch.load(
                    str(path),
                    map_location="cpu",
                    weights_only=True,
                    # Files from before torch 1.6 are not zip files and can only be read whole.
                    mmap=zipfile.is_zipfile(path),
                )
            except Exception as error:  # pickle, zip and torch fail in many ways
                raise RequestError(f"{path} cannot be read: {_first_line(error)}") from error
            if not isinstance(held, dict):
                raise RequestError(f"{path}: holds a {type(held).__name__}, not tensors by name")
            for name, value in held.items():
                if _DERIVED.fullmatch(str(name)):
                    continue
                if isinstance(value, Tensor) and value.dtype in _DTYPES.values():
                    tensors[name] = value.detach()  # its own shape
                else:
                    kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                    faults.append(f"{path}: {name} is {kind}; weights are {', '.join(_DTYPES)}")
        if faults:
            raise RequestError.of(faults)
        super().__init__(tensors)


def open_files(folder: Path) -> Weights:
    """Open a folder's weights, preferring safetensors to torch's files, and one file to shards.

    Raises RequestError if there are none, one cannot be read, or an index names a missing one.
    """
    for name, kind in ((SAFETENSORS, SafetensorsFiles), (TORCH, TorchFiles)):
        if (folder / name).is_file():
            return kind([folder / name])
        if (folder / f"{name}{INDEX}").is_file():
            return kind(_shards(folder / f"{name}{INDEX}"))
    raise RequestError(
        f"{folder} has no weights: neither {SAFETENSORS} nor {TORCH}, nor an index of either"
    )


def has_files(folder: Path) -> bool:
    """Return whether a folder has weights that `open_files` opens, or an index of them."""
    names = (f"{name}{end}" for name in (SAFETENSORS, TORCH) for end in ("", INDEX))
    return any((folder / name).is_file() for name in names)


def open_file(path: Path) -> Weights:
    """Open one file of weights, by its ending. Raises RequestError if it cannot be read."""
    return (SafetensorsFiles if path.suffix == ".safetensors" else TorchFiles)([path])


def _shards(index: Path) -> list[Path]:
    """List the files that an index names."""
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise RequestError(f"{index}: has no weight_map, which says what file a tensor is in")
    names = sorted({str(name) for name in table.values()})
    faults = [
        f"{index}: names {name}, which is not in its folder"
        for name in names
        if Path(name).name != name or not (index.parent / name).is_file()
    ]
    if faults:
        raise RequestError.of(faults)
    return [index.parent / name for name in names]


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
