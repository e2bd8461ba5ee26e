"""Merge what the ranks of a tensor-parallel run of the Neuron system saved, tensor by tensor.

A checkpoint is `<tag>_step_<n>/model/dp_rank_00_tp_rank_<r>_pp_rank_00.pt`, a state dict of each
rank's parts; data-parallel ranks have the same and save it once. Parameters are cut by:

    rows        embeddings, lm_head, in_proj_z, in_proj_dt, A_log, D, dt_bias, the mixer's norm
    columns     out_proj.weight
    sections    conv1d and in_proj_xBC: the rows of x, of B and of C are each cut. So are those of
                z, x, B, C and dt in an in_proj that was not cut in three
    not at all  the other norms, out_proj.bias

The tensors show all sizes except two things: the number of groups of the channels of B and C, and
what the gated norm takes its mean over. Both are given on the command line or in a config.json
beside the files. Otherwise there is one group per rank, and user_content.pt, which holds the flags
of the program, states the norm.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.convert import formats
from training.convert.config import make
from training.convert.formats import EMBEDDING, MIXER, OUTPUT, measured_sizes
from training.convert.weights import Found, TorchFiles, Weights, read_json
from training.errors import RequestError
from training.models import Mamba2Config, Sizes

_FILE = re.compile(r"dp_rank_(\d+)_tp_rank_(\d+)_pp_rank_(\d+)\.pt")
_WHOLE = re.compile(r"backbone\.(layers\.\d+\.norm|norm_f)\.weight|.*\.out_proj\.bias")
_COLUMNS = re.compile(r".*\.out_proj\.weight")
_SECTIONS = re.compile(r".*\.(in_proj|in_proj_xBC|conv1d)\.(weight|bias)")
_TELLING = tuple(f"{MIXER}{name}" for name in ("norm.weight", "conv1d.weight", "A_log"))
"""Tensors with d_inner / t, (d_inner + 2 g n) / t and h / t rows on each of t ranks."""

USER_CONTENT = "user_content.pt"


def find_ranks(folder: Path) -> Path | None:
    """Find the folder of the ranks' files in a checkpoint; None if there are none."""
    places = (folder / "model", folder)
    return next((place for place in places if place.is_dir() and _numbered_files(place)), None)


def rank_checkpoints(folder: Path) -> list[str]:
    """List the checkpoints in a folder, leaving out what this user may not read."""
    inside = (one for one in folder.iterdir() if os.access(one, os.R_OK | os.X_OK))
    return sorted(one.name for one in inside if find_ranks(one) is not None)


def rank_files(place: Path, expected: int | None) -> list[Path]:
    """List the files of the tensor-parallel ranks in their order.

    expected: the number of ranks, if it is known. Raises RequestError if a rank's file is missing,
    or if the checkpoint is incomplete or was saved in another way.
    """
    found = _numbered_files(place)
    if any(pipeline for _, pipeline in found):
        raise RequestError(f"{place}: has files of several pp_ranks; pipelines are not merged")
    parked = sorted(path.name for path in place.glob("*.pt.tensors"))
    if parked:
        raise RequestError(
            f"{place}: {parked[0]} holds the tensors, saved by torch_xla's own serialization, "
            f"which is not read; fix: save the checkpoint without use_xser"
        )
    home = place.parent
    if (home / "checkpoint").is_file() and not (home / "done").is_file():
        raise RequestError(f"{home} was not saved completely: it has no file done")
    ranks = [rank for rank, _ in found]
    count = max([*(rank + 1 for rank in ranks), expected or 1])
    missing = [_name(rank) for rank in range(count) if rank not in ranks]
    if missing:
        raise RequestError(f"{place}: of {count} ranks, missing: {', '.join(missing)}")
    if expected is not None and count > expected:
        raise RequestError(
            f"{place}: has files of {count} ranks, but user_content.pt says that it was saved by "
            f"{expected}; are some of another run?"
        )
    return [place / _name(rank) for rank in range(count)]


class RankFiles(Weights):
    """The merged tensors. Raises RequestError if the ranks' files do not go together."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._ranks = [TorchFiles([path]) for path in paths]
        self._refuse_unlike()
        local = self._ranks[0].found
        self._rows = [
            local[name].shape[0] for name in _TELLING if name in local and local[name].shape
        ]
        self.found = {name: self._merged(name, one) for name, one in local.items()}
        self._refuse_unequal()

    def __len__(self) -> int:
        return len(self._ranks)

    def read(self, name: str) -> Tensor:
        parts = [rank.read(name) for rank in self._ranks]  # a rank's shape, each
        if _WHOLE.fullmatch(name):
            return parts[0]  # its own shape
        if _COLUMNS.fullmatch(name):
            return torch.cat(parts, dim=1)  # (rows, t columns)
        if not _SECTIONS.fullmatch(name):
            return torch.cat(parts)  # (t rows, ...)
        widths = self._widths(name)
        if sum(widths) != len(parts[0]):
            raise RequestError(
                f"{self._paths[0]}: {name} has {len(parts[0])} rows, but the other tensors need "
                f"{sum(widths)}"
            )
        cut = [part.split(widths) for part in parts]  # sections of each rank
        return torch.cat(list(chain.from_iterable(zip(*cut, strict=True))))  # (t rows, ...)

    def equal(self, one: str, other: str) -> bool:
        """Return whether two tensors that are cut alike are equal."""
        return all(torch.equal(rank.read(one), rank.read(other)) for rank in self._ranks)

    def _widths(self, name: str) -> list[int]:
        """Return how many rows each section has on one rank."""
        inner, channels, heads = self._rows
        shared = (channels - inner) // 2  # B's, and C's
        if ".in_proj." in name:
            return [inner, inner, shared, shared, heads]
        return [inner, shared, shared]

    def _merged(self, name: str, one: Found) -> Found:
        shape = list(one.shape)
        if not _WHOLE.fullmatch(name):
            dim = 1 if _COLUMNS.fullmatch(name) and len(shape) > 1 else 0
            shape[dim : dim + 1] = [size * len(self._ranks) for size in shape[dim : dim + 1]]
        return Found(tuple(shape), one.dtype)

    def _refuse_unlike(self) -> None:
        first = self._ranks[0].found
        for path, rank in zip(self._paths[1:], self._ranks[1:], strict=True):
            unlike = sorted(
                name
                for name in first.keys() | rank.found.keys()
                if first.get(name) != rank.found.get(name)
            )
            if unlike:
                raise RequestError(
                    f"{path}: {_listed(unlike)} is not as in {self._paths[0].name}: different in "
                    f"shape or dtype, or in one of them only; are they of one run?"
                )

    def _refuse_unequal(self) -> None:
        """Refuse whole tensors that differ between ranks: each step changes them on all ranks."""
        whole = [name for name in self.found if _WHOLE.fullmatch(name)]
        for path, rank in zip(self._paths[1:], self._ranks[1:], strict=True):
            unequal = [n for n in whole if not torch.equal(self._ranks[0].read(n), rank.read(n))]
            if unequal:
                raise RequestError(
                    f"{path}: {_listed(unequal)} is not the same as in {self._paths[0].name}, and "
                    f"every rank has it whole; are the files of different steps or runs?"
                )


def _numbered_files(place: Path) -> list[tuple[int, int]]:
    """List (tp_rank, pp_rank) of the first data-parallel rank's files."""
    try:
        found = [_FILE.fullmatch(path.name) for path in place.iterdir()]
    except OSError as error:
        raise RequestError(f"{place} cannot be read: {error.strerror}") from error
    return sorted((int(one[2]), int(one[3])) for one in found if one and int(one[1]) == 0)


def _name(rank: int) -> str:
    return f"dp_rank_00_tp_rank_{rank:02}_pp_rank_00.pt"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


@dataclass(frozen=True)
class RankSettings:
    """What the command line states."""

    n_groups: int | None = None
    norm_across_groups: bool | None = None


def open_ranks(place: Path, settings: RankSettings) -> tuple[Sizes, RankFiles]:
    """Open the files of the ranks in a folder. Raises RequestError if something does not fit."""
    homes = (place, place.parent)
    flags = next(
        (_flags(home / USER_CONTENT) for home in homes if (home / USER_CONTENT).is_file()), {}
    )
    expected = flags.get("tp")
    weights = RankFiles(rank_files(place, expected if type(expected) is int else None))
    config = next(
        (home / "config.json" for home in homes if (home / "config.json").is_file()), None
    )
    if config is not None:
        sizes = formats.read_neuron(read_json(config), config)
        assert isinstance(sizes, Mamba2Config)
        sizes = replace(sizes, n_groups=settings.n_groups or sizes.n_groups)
        across: bool | None = sizes.norm_across_groups
    else:
        sizes = _measured(place, weights, settings.n_groups or len(weights))
        across = flags.get("rmsnorm_across_groups")
    if sizes.n_groups % len(weights):
        raise RequestError(
            f"{place}: n_groups {sizes.n_groups} is not a multiple of the {len(weights)} ranks, "
            f"and each rank has whole groups; fix: give another with --n-groups"
        )
    if settings.norm_across_groups is None:
        across = _across(across, sizes.n_groups, len(weights), place)
    else:
        across = settings.norm_across_groups
    return replace(sizes, norm_across_groups=across and sizes.n_groups > 1), weights


def _measured(place: Path, weights: RankFiles, n_groups: int) -> Mamba2Config:
    """Derive the sizes from the tensors; in the known program, d_inner is twice d_model."""
    shapes = {name: one.shape for name, one in weights.found.items()}
    values = measured_sizes(shapes, n_groups, place)
    if values["expand"] != 2:
        raise RequestError(
            f"{place}: {len(weights)} ranks together have a d_inner that is {values['expand']} "
            f"times d_model, not 2; fix: give the files of all ranks, or put config.json beside "
            f"them"
        )
    if OUTPUT in shapes:
        values["tie_embeddings"] = shapes[OUTPUT] == shapes[EMBEDDING] and weights.equal(
            OUTPUT, EMBEDDING
        )
    sizes = make("mamba2", {**values, "initializer_range": 0.1}, place)
    assert isinstance(sizes, Mamba2Config)
    return sizes


def _across(across: bool | None, n_groups: int, ranks: int, place: Path) -> bool:
    """Return whether the norm takes its mean over all channels of the whole model.

    If all channels are asked for, a rank of that program takes those that it has: with one group
    per rank, that is the same as taking each group by itself. Raises RequestError if nothing states
    it, or if no whole model computes what the ranks did.
    """
    if n_groups == ranks or across is False:
        return False
    if across is None:
        raise RequestError(
            f"{place}: nothing says whether the gated norm takes the mean of each of its "
            f"{n_groups} groups or of all channels; fix: give --norm-across-groups=False or True"
        )
    if ranks > 1:
        raise RequestError(
            f"{place}: its norm was said to cross groups, so each of {ranks} ranks took the mean "
            f"of its own {n_groups // ranks} groups, which no whole model does; "
            f"fix: say what to make of it by --norm-across-groups"
        )
    return True


def _flags(path: Path) -> dict[str, Any]:
    """Read the flags of the program that saved a checkpoint."""
    try:
        with zipfile.ZipFile(path) as file:
            (name,) = (one for one in file.namelist() if one.endswith("/data.pkl"))
            content = _Plain(io.BytesIO(file.read(name))).load()
    except Exception as error:  # pickle and zip fail in many ways
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RequestError(
            f"{path} cannot be read: {reason}; fix: remove it, and put config.json beside the "
            f"ranks' files, which says the same"
        ) from error
    flags = content.get("cli_args") if isinstance(content, dict) else None
    return flags if isinstance(flags, dict) else {}


class _Plain(pickle.Unpickler):
    """Unpickles plain values, and dtypes, which torch 2.2's own safe loading does not know."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if not isinstance(found, torch.dtype):
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which is not a plain value")
        return found
