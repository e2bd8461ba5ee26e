"""The params.json of Mistral's Mamba-2 models and our sizes. Light: no torch here.

It says few sizes; the others are those of the tensors. The models are mamba-ssm's, so the gated
norm works on each group alone, and an epsilon is 1e-5.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.convert.config import make
from training.convert.measure import measured
from training.errors import RequestError
from training.models import Sizes

PARAMS, WEIGHTS = "params.json", "consolidated.safetensors"
PREFIX = "model."
"""Before the names of tensors."""

_NEEDED = ("dim", "n_layers")
_NUMBERS = (*_NEEDED, "vocab_size", "n_groups", "pad_vocab_size_multiple")
_ONLY = {"model_type": "mamba", "rms_norm": True}
"""Settings -> the value that ours has."""


def read(settings: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], where: Path) -> Sizes:
    """Read the sizes, given the tensors' shapes by the file's names.

    Raises RequestError listing what is missing, of another type, or not as our models have it.
    """
    faults = [f"{name} is not there" for name in _NEEDED if name not in settings]
    faults += [
        f"{name} must be a whole number from 1 on, not {settings[name]!r}"
        for name in _NUMBERS
        if name in settings and (type(settings[name]) is not int or settings[name] < 1)
    ]
    faults += [
        f"{name} {settings[name]!r}: ours has {only!r} only"
        for name, only in _ONLY.items()
        if settings.get(name, only) != only
    ]
    if faults:
        raise RequestError.of([f"{where}: {fault}" for fault in faults])
    ours = {
        name.removeprefix(PREFIX).replace("backbone.embedding.", "backbone.embeddings."): shape
        for name, shape in shapes.items()
    }
    values = measured(ours, settings.get("n_groups", 1), where.with_name(WEIGHTS))
    values |= {"d_model": settings["dim"], "n_layer": settings["n_layers"]}
    if "vocab_size" in settings:
        multiple = settings.get("pad_vocab_size_multiple", 1)
        values["vocab_size"] = -(-settings["vocab_size"] // multiple) * multiple
    values |= {n: settings[n] for n in ("tie_embeddings", "residual_in_fp32") if n in settings}
    return make("mamba2", values, where)
