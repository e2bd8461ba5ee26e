"""The sizes of a model whose ranks' files are merged.

The files tell all but two things: how many groups the channels of B and C are of, and what the
gated norm takes its mean over. Those are in a config.json beside the files, in user_content.pt,
which holds the flags of the program, or are told on the command line.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from training.convert import neuron
from training.convert.config import make
from training.convert.measure import EMBEDDING, OUTPUT, measured
from training.convert.ranks import RankFiles, files
from training.convert.weights import read_json
from training.errors import RequestError
from training.models import Mamba2Config, Sizes

CONTENT = "user_content.pt"


@dataclass(frozen=True)
class Told:
    """What the command line tells."""

    n_groups: int | None = None
    norm_across_groups: bool | None = None


def open_ranks(place: Path, told: Told) -> tuple[Sizes, RankFiles]:
    """Open the files of the ranks in a folder. Raises RequestError if something does not fit."""
    homes = (place, place.parent)
    flags = next((_flags(home / CONTENT) for home in homes if (home / CONTENT).is_file()), {})
    expected = flags.get("tp")
    weights = RankFiles(files(place, expected if type(expected) is int else None))
    config = next(
        (home / "config.json" for home in homes if (home / "config.json").is_file()), None
    )
    if config is not None:
        sizes = neuron.read(read_json(config), config)
        assert isinstance(sizes, Mamba2Config)
        sizes = replace(sizes, n_groups=told.n_groups or sizes.n_groups)
        across: bool | None = sizes.norm_across_groups
    else:
        sizes = _measured(place, weights, told.n_groups or len(weights))
        across = flags.get("rmsnorm_across_groups")
    if sizes.n_groups % len(weights):
        raise RequestError(
            f"{place}: n_groups {sizes.n_groups} is no multiple of the {len(weights)} ranks, and "
            f"each rank has whole groups; --n-groups tells another"
        )
    if told.norm_across_groups is None:
        across = _across(across, sizes.n_groups, len(weights), place)
    else:
        across = told.norm_across_groups
    return replace(sizes, norm_across_groups=across and sizes.n_groups > 1), weights


def _measured(place: Path, weights: RankFiles, n_groups: int) -> Mamba2Config:
    """Measure the sizes. The known program has a group a rank, and d_inner is twice d_model."""
    shapes = {name: one.shape for name, one in weights.found.items()}
    values = measured(shapes, n_groups, place)
    if values["expand"] != 2:
        raise RequestError(
            f"{place}: {len(weights)} ranks together have a d_inner that is {values['expand']} "
            f"times d_model, not 2: give the files of all ranks, or put config.json beside them"
        )
    if OUTPUT in shapes:
        values["tie_embeddings"] = shapes[OUTPUT] == shapes[EMBEDDING] and weights.equal(
            OUTPUT, EMBEDDING
        )
    sizes = make("mamba2", {**values, "initializer_range": 0.1}, place)
    assert isinstance(sizes, Mamba2Config)
    return sizes


def _across(across: bool | None, n_groups: int, ranks: int, place: Path) -> bool:
    """Tell what the norm takes its mean over in the whole model.

    Told to take all channels, a rank of that program takes those that it has: with one group a
    rank, that is what taking each group alone is.
    """
    if n_groups == ranks or across is False:
        return False
    if across is None:
        raise RequestError(
            f"{place}: nothing says whether the gated norm takes the mean of each of its "
            f"{n_groups} groups or of all channels: give --norm-across-groups=False or True"
        )
    if ranks > 1:
        raise RequestError(
            f"{place}: its norm was told to cross groups, so each of {ranks} ranks took the mean "
            f"of its own {n_groups // ranks} groups, which no whole model does; "
            f"--norm-across-groups says what to make of it"
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
            f"{path} cannot be read: {reason}; without it, config.json beside the ranks' files "
            f"says what it says"
        ) from error
    flags = content.get("cli_args") if isinstance(content, dict) else None
    return flags if isinstance(flags, dict) else {}


class _Plain(pickle.Unpickler):
    """Reads plain values, and dtypes, which torch 2.2's own safe reading does not know."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if not isinstance(found, torch.dtype):
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no plain value")
        return found
