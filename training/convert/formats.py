"""The settings of the Neuron system's and Mistral's models, and our sizes.

Most sizes of a Mamba-2 model also follow from the shapes of its tensors. No torch here.

The Neuron system's Mamba-2: Hugging Face's config.json with additional settings.
rmsnorm_within_groups says that the gated norm takes the mean square of each group of channels, like
our norm_across_groups=False.

Mistral's Mamba-2 (codestral): params.json states few sizes; the others follow from the tensors. The
models are mamba-ssm's, so the gated norm works on each group by itself, and epsilon is 1e-5.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from training.convert import hf
from training.convert.config import make
from training.errors import RequestError
from training.models import Mamba2Config, Sizes

EMBEDDING, OUTPUT = "backbone.embeddings.weight", "lm_head.weight"
MIXER = "backbone.layers.0.mixer."
_LAYER = re.compile(r"backbone\.layers\.(\d+)\.")
_MEASURED = {
    EMBEDDING: 2,  # (v, d_model)
    f"{MIXER}norm.weight": 1,  # (d_inner,)
    f"{MIXER}A_log": 1,  # (h,)
    f"{MIXER}conv1d.weight": 3,  # (d_inner + 2 g n, 1, k)
}
"""Tensors whose shapes show sizes, and their numbers of dimensions."""

NORM_WITHIN_GROUPS = "rmsnorm_within_groups"

CODESTRAL_PARAMS, CODESTRAL_WEIGHTS = "params.json", "consolidated.safetensors"
CODESTRAL_PREFIX = "model."
"""Prefix of the tensors' names."""

_CODESTRAL_NEEDED = ("dim", "n_layers")
_CODESTRAL_NUMBERS = (*_CODESTRAL_NEEDED, "vocab_size", "n_groups", "pad_vocab_size_multiple")
_ONLY_OF_CODESTRAL = {"model_type": "mamba", "rms_norm": True}
"""Settings -> the only value that ours has."""


def measured_sizes(
    shapes: Mapping[str, tuple[int, ...]], n_groups: int, where: Path
) -> dict[str, Any]:
    """Return the sizes that follow from the tensors' shapes, by our names, and from `n_groups`.

    tie_embeddings is True if there is no output embedding. Raises RequestError if a tensor that is
    needed is missing, or if shapes contradict each other.
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
        faults.append(f"d_inner {d_inner} is not a multiple of d_model {d_model}")
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


def read_neuron(settings: dict[str, Any], where: Path) -> Sizes:
    """Read the sizes. Raises RequestError naming each setting that our models do not have."""
    faults = []
    if settings.get("model_type", "mamba2") != "mamba2":
        faults.append(f"model_type {settings['model_type']!r}: the Neuron system has mamba2 only")
    if settings.get("rms_norm", True) is not True:
        faults.append(f"rms_norm {settings['rms_norm']!r}: ours has True only")
    if faults:
        raise RequestError.of([f"{where}: {fault}" for fault in faults])
    return hf.read({NORM_WITHIN_GROUPS: True, **settings, "model_type": "mamba2"}, where)


def write_neuron(sizes: Sizes) -> dict[str, Any]:
    """Write the settings of a model. Raises RequestError if it is not of Mamba-2."""
    if not isinstance(sizes, Mamba2Config):
        raise RequestError(f"neuron: has Mamba-2 models only, not {sizes.family}")
    # The setting below states what those of transformers cannot.
    settings = hf.write(replace(sizes, norm_across_groups=True))
    return settings | {
        "time_step_rank": math.ceil(sizes.d_model / 16),
        "rms_norm": True,
        NORM_WITHIN_GROUPS: not sizes.norm_across_groups,
    }


def read_codestral(
    settings: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], where: Path
) -> Sizes:
    """Read the sizes, given the tensors' shapes by the file's names.

    Raises RequestError listing what is missing, of another type, or not as our models have it.
    """
    faults = [f"{name} is missing" for name in _CODESTRAL_NEEDED if name not in settings]
    faults += [
        f"{name} must be a whole number of at least 1, not {settings[name]!r}"
        for name in _CODESTRAL_NUMBERS
        if name in settings and (type(settings[name]) is not int or settings[name] < 1)
    ]
    faults += [
        f"{name} {settings[name]!r}: ours has {only!r} only"
        for name, only in _ONLY_OF_CODESTRAL.items()
        if settings.get(name, only) != only
    ]
    if faults:
        raise RequestError.of([f"{where}: {fault}" for fault in faults])
    ours = {
        name.removeprefix(CODESTRAL_PREFIX).replace(
            "backbone.embedding.", "backbone.embeddings."
        ): shape
        for name, shape in shapes.items()
    }
    values = measured_sizes(ours, settings.get("n_groups", 1), where.with_name(CODESTRAL_WEIGHTS))
    values |= {"d_model": settings["dim"], "n_layer": settings["n_layers"]}
    if "vocab_size" in settings:
        multiple = settings.get("pad_vocab_size_multiple", 1)
        values["vocab_size"] = -(-settings["vocab_size"] // multiple) * multiple
    values |= {n: settings[n] for n in ("tie_embeddings", "residual_in_fp32") if n in settings}
    return make("mamba2", values, where)
