"""What the ranks of a tensor-parallel run of the Neuron system saved, merged one tensor at a time.

A checkpoint is `<tag>_step_<n>/model/dp_rank_00_tp_rank_<r>_pp_rank_00.pt`, a state dict of each
rank's parts; ranks of data parallelism have the same and save once. How a parameter is cut:

    rows        embeddings, lm_head, in_proj_z, in_proj_dt, A_log, D, dt_bias, the mixer's norm
    columns     out_proj.weight
    sections    conv1d and in_proj_xBC: the rows of x, B and C are each cut. So are those of z, x,
                B, C and dt of an in_proj that was not cut in three
    not at all  the other norms, out_proj.bias
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from training.convert.measure import MIXER
from training.convert.weights import Found, TorchFiles, Weights
from training.errors import RequestError

_FILE = re.compile(r"dp_rank_(\d+)_tp_rank_(\d+)_pp_rank_(\d+)\.pt")
_WHOLE = re.compile(r"backbone\.(layers\.\d+\.norm|norm_f)\.weight|.*\.out_proj\.bias")
_COLUMNS = re.compile(r".*\.out_proj\.weight")
_SECTIONS = re.compile(r".*\.(in_proj|in_proj_xBC|conv1d)\.(weight|bias)")
_TELLING = tuple(f"{MIXER}{name}" for name in ("norm.weight", "conv1d.weight", "A_log"))
"""Whose rows of one rank are d_inner / t, (d_inner + 2 g n) / t and h / t, with t ranks."""


def find(folder: Path) -> Path | None:
    """Find where the ranks' files are in a checkpoint; None if there are none."""
    places = (folder / "model", folder)
    return next((place for place in places if place.is_dir() and _numbered(place)), None)


def checkpoints(folder: Path) -> list[str]:
    """List the checkpoints that a folder holds."""
    return sorted(one.name for one in folder.iterdir() if find(one) is not None)


def files(place: Path, expected: int | None) -> list[Path]:
    """List the files of the tensor-parallel ranks in their order.

    Raises RequestError if a rank's is missing (of so many as are expected, where that is known),
    or the checkpoint is not complete or was saved in another way.
    """
    found = _numbered(place)
    if any(pipeline for _, pipeline in found):
        raise RequestError(f"{place}: has files of several pp_ranks; pipelines are not merged")
    parked = sorted(path.name for path in place.glob("*.pt.tensors"))
    if parked:
        raise RequestError(
            f"{place}: {parked[0]} holds the tensors, saved by torch_xla's own serialization, "
            f"which is not read; save the checkpoint without use_xser"
        )
    home = place.parent
    if (home / "checkpoint").is_file() and not (home / "done").is_file():
        raise RequestError(f"{home} was not saved to its end: it has no file done")
    ranks = [rank for rank, _ in found]
    count = max([*(rank + 1 for rank in ranks), expected or 1])
    missing = [_name(rank) for rank in range(count) if rank not in ranks]
    if missing:
        raise RequestError(f"{place}: of {count} ranks, is missing: {', '.join(missing)}")
    if expected is not None and count > expected:
        raise RequestError(
            f"{place}: has files of {count} ranks, and user_content.pt says that it was saved by "
            f"{expected}; are some of another run?"
        )
    return [place / _name(rank) for rank in range(count)]


class RankFiles(Weights):
    """The whole tensors. Raises RequestError if the ranks' files do not go with each other."""

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
                f"{self._paths[0]}: {name} has {len(parts[0])} rows, and the other tensors ask "
                f"for {sum(widths)}"
            )
        cut = [part.split(widths) for part in parts]  # sections of each rank
        return torch.cat(list(chain.from_iterable(zip(*cut, strict=True))))  # (t rows, ...)

    def equal(self, one: str, other: str) -> bool:
        """Tell whether two tensors that are cut alike are the same."""
        return all(torch.equal(rank.read(one), rank.read(other)) for rank in self._ranks)

    def _widths(self, name: str) -> list[int]:
        """Tell how many rows of one rank are of each section."""
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
                    f"{path}: {_listed(unlike)} is not as in {self._paths[0].name}: another shape "
                    f"or dtype, or in one of them only; are they of one run?"
                )

    def _refuse_unequal(self) -> None:
        """What every rank has whole must be the same: each step changes it on all of them."""
        whole = [name for name in self.found if _WHOLE.fullmatch(name)]
        for path, rank in zip(self._paths[1:], self._ranks[1:], strict=True):
            unequal = [n for n in whole if not torch.equal(self._ranks[0].read(n), rank.read(n))]
            if unequal:
                raise RequestError(
                    f"{path}: {_listed(unequal)} is not the same as in {self._paths[0].name}, and "
                    f"every rank has it whole; are the files of different steps or runs?"
                )


def _numbered(place: Path) -> list[tuple[int, int]]:
    """List (tp_rank, pp_rank) of the files of the first data-parallel rank."""
    try:
        found = [_FILE.fullmatch(path.name) for path in place.iterdir()]
    except OSError as error:
        raise RequestError(f"{place} cannot be read: {error.strerror}") from error
    return sorted((int(one[2]), int(one[3])) for one in found if one and int(one[1]) == 0)


def _name(rank: int) -> str:
    return f"dp_rank_00_tp_rank_{rank:02}_pp_rank_00.pt"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
