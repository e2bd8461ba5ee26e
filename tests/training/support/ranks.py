"""A Mamba-2 model as the ranks of the Neuron system save it, split here by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.training.support.families import filled
from training.models import Mamba2Config

SIZES = Mamba2Config(
    d_model=32, n_layer=2, vocab_size=48, d_state=8, head_dim=8, n_groups=4, chunk_size=16
)
CORE = "backbone.layers.0.mixer."


def weights(sizes: Mamba2Config) -> dict[str, Tensor]:
    """Draw random weights under our names, with all values different."""
    random = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(one.shape, generator=random)
        for name, one in filled(sizes).named_parameters()
    }


def split(held: dict[str, Tensor], sizes: Mamba2Config) -> dict[str, Tensor]:
    """Split in_proj into three, as the system does."""
    found: dict[str, Tensor] = {}
    inner, end = sizes.d_inner, sizes.d_inner + sizes.d_conv_in
    for name, value in held.items():
        if ".in_proj." not in name:
            found[name] = value
            continue
        for cut, rows in (("z", value[:inner]), ("xBC", value[inner:end]), ("dt", value[end:])):
            found[name.replace("in_proj", f"in_proj_{cut}")] = rows
    return found


def rank_part(
    held: dict[str, Tensor], sizes: Mamba2Config, rank: int, ranks: int
) -> dict[str, Tensor]:
    """Return one rank's state dict, of tensors under the system's names or with a fused in_proj."""

    def rows(value: Tensor) -> Tensor:
        return value.chunk(ranks)[rank]

    def sections(value: Tensor, *widths: int) -> Tensor:
        return torch.cat([rows(section) for section in value.split(widths)])

    inner, shared = sizes.d_inner, sizes.n_groups * sizes.d_state
    found = {}
    for name, value in held.items():
        if name.endswith(("norm_f.weight", "out_proj.bias")) or (
            ".norm." in name and ".mixer." not in name
        ):
            found[name] = value
        elif name.endswith("out_proj.weight"):
            found[name] = value.chunk(ranks, dim=1)[rank]
        elif ".conv1d." in name or ".in_proj_xBC." in name:
            found[name] = sections(value, inner, shared, shared)
        elif ".in_proj." in name:
            found[name] = sections(value, inner, inner, shared, shared, sizes.n_head)
        else:
            found[name] = rows(value)
    found = {name: value.clone() for name, value in found.items()}
    if sizes.tie_embeddings:
        found["lm_head.weight"] = found["backbone.embeddings.weight"]
    return found


def save(
    folder: Path,
    sizes: Mamba2Config,
    ranks: int,
    flags: dict[str, Any] | None = None,
    fused: bool = False,
) -> dict[str, Tensor]:
    """Write a checkpoint; returns the whole weights under our names."""
    held = weights(sizes)
    theirs = held if fused else split(held, sizes)
    (folder / "model").mkdir(parents=True)
    for rank in range(ranks):
        torch.save(rank_part(theirs, sizes, rank, ranks), rank_file(folder, rank))
    if flags is not None:
        torch.save({"global_step": 8, "cli_args": flags}, folder / "user_content.pt")
    return held


def rank_file(folder: Path, rank: int) -> Path:
    return folder / "model" / f"dp_rank_00_tp_rank_{rank:02}_pp_rank_00.pt"
