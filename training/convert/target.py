"""Write a model's folder in any format: completely, or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from training.convert import formats, hf, native, state_spaces
from training.convert.folders import CONFIG
from training.convert.names import Stored, doubles, layout
from training.convert.source import Source
from training.convert.weights import INDEX, SAFETENSORS, TORCH, read_json
from training.errors import RequestError, TrainingError

SHARD = 5 * 10**9
"""The default for the most bytes of a file of tensors."""

TEMPORARY = ".tmp"
"""Suffix of a folder's name while it is written."""

_GENERATION = "generation_config.json"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    _GENERATION,
)
"""Files that are copied as they are."""

_WRITE = {
    "hf": hf.write,
    "state-spaces": state_spaces.write,
    "ours": native.write_sizes,
    "neuron": formats.write_neuron,
    "neuron-fused": formats.write_neuron,
}
_WITHOUT_IDS = ("state-spaces", "ours")
"""Formats whose config.json states no token ids."""
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Written:
    """What a conversion wrote."""

    tensors: int
    size: int
    files: int


@dataclass(frozen=True)
class _Item:
    """A tensor to write, and its dtype; several pieces are joined in their order."""

    pieces: tuple[Stored, ...]
    dtype: torch.dtype

    @property
    def stored(self) -> Stored:
        return self.pieces[0]

    @property
    def size(self) -> int:
        return torch.Size(self.stored.shape).numel() * self.dtype.itemsize


def write_model(
    source: Source,
    form: str,
    folder: Path,
    dtype: torch.dtype | None,
    max_shard: int | None,
    settings: Mapping[str, Any] = _NOTHING,
    tokenizer: Mapping[str, Path] | None = None,
) -> Written:
    """Write a model; with a `dtype` of None, each parameter keeps its own.

    settings: what config.json states besides the sizes. tokenizer: files to copy, by the names that
    they get; by default the source's. A tensor that is larger than `max_shard` bytes has a file of
    its own. Raises RequestError if the folder exists, its parent does not, or the format has no
    such model; TrainingError if the disk is full or fails, and then nothing is left.
    """
    if form == "state-spaces" and max_shard is not None:
        raise RequestError("--max-shard-size: state-spaces always has one file; fix: leave it out")
    ids = _token_ids(source.folder)
    settings = settings if form in _WITHOUT_IDS else {**ids, **settings}
    written = _WRITE[form](source.sizes) | dict(settings)
    stored = layout(form, source.sizes, source.parameters)
    items = [_Item(one, dtype or source.dtype(one[0].parameter)) for one in _pieces(stored)]
    dtypes = {item.dtype for item in items}
    if form in ("hf", "neuron", "neuron-fused") and len(dtypes) == 1:
        written["torch_dtype"] = str(items[0].dtype).removeprefix("torch.")
    total = sum(item.size for item in items)
    _refuse(folder, total * (2 if form == "state-spaces" else 1))
    with _complete_or_absent(folder) as place:
        if form == "state-spaces":
            count = _write_torch(source, items, place)
        else:
            count = _write_safetensors(source, items, place, max_shard or SHARD, total)
        (place / CONFIG).write_text(json.dumps(written, indent=2) + "\n")
        files = _own_files(source) if tokenizer is None else tokenizer
        for name, path in files.items():
            shutil.copyfile(path, place / name)
        if ids and form in _WITHOUT_IDS and _GENERATION not in files:
            (place / _GENERATION).write_text(json.dumps(ids, indent=2) + "\n")
        mode = (place / CONFIG).stat().st_mode
        for path in place.iterdir():
            path.chmod(mode)  # safetensors lets only its user read what it writes
    return Written(tensors=len(items), size=total, files=count)


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """Find the files of a tokenizer in a folder, and others that are copied with a model."""
    return {name: folder / name for name in TOKENIZER if (folder / name).is_file()}


def _own_files(source: Source) -> dict[str, Path]:
    return {name: path for name in TOKENIZER if (path := source.find(name))}


def _token_ids(folder: Path) -> dict[str, Any]:
    """Read the special tokens that a folder's config.json states."""
    stated = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    return {name: stated[name] for name in _IDS if stated.get(name) is not None}


def clear_leftovers(folder: Path) -> None:
    """Remove what processes that were killed while writing a folder have left beside it.

    Call it only if no other process writes that folder.
    """
    name = re.compile(rf"{re.escape(folder.name)}\.\d+{re.escape(TEMPORARY)}")
    for path in folder.absolute().parent.iterdir():
        if name.fullmatch(path.name):
            shutil.rmtree(path)


def _pieces(stored: list[Stored]) -> list[tuple[Stored, ...]]:
    """Group the pieces that are one tensor of a file."""
    found: dict[str, list[Stored]] = {}
    for one in stored:
        found.setdefault(one.name, []).append(one)
    return [tuple(sorted(ones, key=lambda one: one.joined or (0, 0))) for ones in found.values()]


def _tensors(source: Source, items: list[_Item]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors to write, in order; each parameter is read once, and then released."""
    for parameter, group in groupby(items, key=lambda item: item.stored.parameter):
        whole = source.read(parameter)  # the parameter's shape
        for item in group:
            chosen = item.stored.part
            # A copy, as a view of a part would keep the whole in memory.
            part = whole if chosen is None else whole[chosen].clone()  # the tensor's shape
            if item.stored.joined is not None:
                rest = [source.read(one.parameter) for one in item.pieces[1:]]  # like the first
                part = torch.cat([part, *rest], dim=item.stored.joined[0])  # the tensor's shape
            yield item.stored.name, part.to(item.dtype).contiguous()


def _write_safetensors(
    source: Source, items: list[_Item], place: Path, max_shard: int, total: int
) -> int:
    """Write one file, or shards and their index; return the number of files."""
    shards = _shards([item.size for item in items], max_shard)
    tensors = _tensors(source, items)
    table: dict[str, str] = {}
    for number, count in enumerate(shards, start=1):
        name = SAFETENSORS
        if len(shards) > 1:
            stem, end = name.split(".")
            name = f"{stem}-{number:05}-of-{len(shards):05}.{end}"
        held = dict(islice(tensors, count))
        table |= dict.fromkeys(held, name)
        save_file(held, str(place / name), metadata={"format": "pt"})
        held.clear()  # before the next file is collected
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": table}
        (place / f"{SAFETENSORS}{INDEX}").write_text(json.dumps(index, indent=2) + "\n")
    return len(shards)


def _write_torch(source: Source, items: list[_Item], place: Path) -> int:
    """Write one file by torch.save.

    It needs all tensors at once, so each is first written to a file of its own and mapped from
    there, which takes disk space but no memory.
    """
    parked = place / "parked"
    parked.mkdir()
    paths = {}
    for number, (name, tensor) in enumerate(_tensors(source, items)):
        paths[name] = str(parked / f"{number}.pt")
        torch.save(tensor.clone(), paths[name])  # a view would save all of its storage
    # Only once all are written: what is kept between large pieces of memory that are freed makes
    # holes that the allocator does not give back.
    held = {n: torch.load(path, mmap=True, weights_only=True) for n, path in paths.items()}
    names = {item.stored.parameter: item.stored.name for item in items}
    for again in doubles(source.parameters):
        held[again.name] = held[names[again.parameter]]  # stored once: torch.save sees one storage
    torch.save(held, str(place / TORCH))
    shutil.rmtree(parked)
    return 1


def _shards(sizes: list[int], most: int) -> list[int]:
    """Divide a sequence of tensors into files; return how many tensors each file has."""
    counts, room = [0], most
    for size in sizes:
        if size > room and counts[-1]:
            counts.append(0)
            room = most
        counts[-1] += 1
        room -= size
    return counts


def _refuse(folder: Path, needed: int) -> None:
    """Check a destination before anything is read. Raises RequestError and TrainingError."""
    try:
        if folder.exists() or folder.is_symlink():
            raise RequestError(f"{folder} already exists; fix: give a folder that does not")
        if not folder.absolute().parent.is_dir():
            above = folder.absolute().parent
            raise RequestError(f"{folder} cannot be made: {above} is not a folder")
        free = shutil.disk_usage(folder.absolute().parent).free
    except OSError as error:
        raise RequestError(f"{folder} cannot be made: {error.strerror}") from error
    if needed > free:
        raise TrainingError(f"{folder} needs {needed:,} bytes, but only {free:,} are free there")


@contextmanager
def _complete_or_absent(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which gets the name `folder` once all of it is on disk."""
    place = folder.absolute().with_name(f"{folder.absolute().name}.{os.getpid()}{TEMPORARY}")
    try:
        place.mkdir()
        yield place
        for path in [*place.iterdir(), place]:
            _sync(path)
        place.rename(folder)
        _sync(place.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        # Safetensors and torch report a full disk by errors of their own.
        free = shutil.disk_usage(place.parent).free
        cause: Any = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        raise TrainingError(
            f"{folder} cannot be written ({free:,} bytes are free there): {cause}"
        ) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
