"""Sizes of a Mamba-2 model from the shapes of its tensors. Light: no torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.errors import RequestError

EMBEDDING, OUTPUT = "backbone.embeddings.weight", "lm_head.weight"
MIXER = "backbone.layers.0.mixer."
_LAYER = re.compile(r"backbone\.layers\.(\d+)\.")
_MEASURED = {
    EMBEDDING: 2,  # (v, d_model)
    f"{MIXER}norm.weight": 1,  # (d_inner,)
    f"{MIXER}A_log": 1,  # (h,)
    f"{MIXER}conv1d.weight": 3,  # (d_inner + 2 g n, 1, k)
}
"""Tensors that tell of sizes, and their dimensions."""


def measured(shapes: Mapping[str, tuple[int, ...]], n_groups: int, where: Path) -> dict[str, Any]:
    """Give what the shapes, by our names, tell of the sizes where there are so many groups.

    tie_embeddings is True where there is no output embedding. Raises RequestError if a tensor that
    tells is missing, or shapes do not go with each other.
    """
    faults = [
        f"{name} has shape {shapes[name]}" if name in shapes else f"{name} is missing"
        for name, dimensions in _MEASURED.items()
        if len(shapes.get(name, ())) != dimensions or 0 in shapes[name]
    ]
    if faults:
        raise RequestError.of([f"{where}: {fault}" for fault in faults])
    vocab_size, d_model = shapes[EMBEDDING]
    (d_inner,), (n_head,) = shapes[f"{MIXER}norm.weight"], shapes[f"{MIXER}A_log"]
    channels, _, d_conv = shapes[f"{MIXER}conv1d.weight"]
    shared = channels - d_inner  # of B and C, of all groups
    if d_inner % d_model or d_inner < d_model:
        faults.append(f"d_inner {d_inner} is no multiple of d_model {d_model}")
    if d_inner % n_head:
        faults.append(f"its {n_head} heads do not divide d_inner {d_inner}")
    if shared < 1 or shared % (2 * n_groups):
        faults.append(f"n_groups: {n_groups} do not divide the {shared} channels of B and C")
    if faults:
        raise RequestError.of([f"{where}: {fault}" for fault in faults])
    return {
        "d_model": d_model,
        "n_layer": len({found[1] for name in shapes if (found := _LAYER.match(name))}),
        "vocab_size": vocab_size,
        "d_state": shared // (2 * n_groups),
        "d_conv": d_conv,
        "expand": d_inner // d_model,
        "head_dim": d_inner // n_head,
        "n_groups": n_groups,
        "bias": f"{MIXER}out_proj.bias" in shapes,
        "conv_bias": f"{MIXER}conv1d.bias" in shapes,
        "tie_embeddings": OUTPUT not in shapes,
    }
