"""The settings of others' models and our sizes: mamba-ssm's, the Neuron system's, Mistral's.

Sizes of a Mamba-2 model are told also by the shapes of its tensors. Light: no torch here.

mamba-ssm (state-spaces): its norms have an epsilon of 1e-5, always; its vocabulary is the tokens',
and the embedding is padded to a multiple. Mamba-2's gated norm works on each group alone.

The Neuron system's Mamba-2: Hugging Face's config.json with settings beside: rmsnorm_within_groups
says that the gated norm takes the mean square of each group of channels, as our
norm_across_groups=False does.

Mistral's Mamba-2 (codestral): params.json says few sizes; the others are those of the tensors. The
models are mamba-ssm's, so the gated norm works on each group alone, and an epsilon is 1e-5.
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
from training.models import Mamba2Config, MambaConfig, Sizes

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

Settings = dict[str, Any]

_EPSILON = 1e-5
_MAMBA = {
    "d_state": "d_state",
    "d_conv": "d_conv",
    "expand": "expand",
    "bias": "bias",
    "conv_bias": "conv_bias",
    "dt_min": "dt_min",
    "dt_max": "dt_max",
    "dt_init_floor": "dt_init_floor",
}
_NAMES = {
    "mamba": _MAMBA,
    "mamba2": {
        **_MAMBA,
        "head_dim": "headdim",
        "n_groups": "ngroups",
        "chunk_size": "chunk_size",
    },
}
"""Family -> our names -> those of ssm_cfg; both have the same defaults."""
_LAYERS = {"Mamba1": "mamba", "Mamba2": "mamba2"}
_ONLY_OF_MODEL: dict[str, tuple[Any, ...]] = {
    "d_intermediate": (0,),
    "attn_layer_idx": ([], None),
    "rms_norm": (True,),
}
"""Settings of the model -> the values that ours has."""
_ONLY_OF_LAYERS: dict[str, tuple[Any, ...]] = {
    "d_ssm": (None,),
    "D_has_hdim": (False,),
    "rmsnorm": (True,),
    "norm_before_gate": (False,),
}
"""The same for those of ssm_cfg."""

NORM_WITHIN_GROUPS = "rmsnorm_within_groups"

CODESTRAL_PARAMS, CODESTRAL_WEIGHTS = "params.json", "consolidated.safetensors"
CODESTRAL_PREFIX = "model."
"""Before the names of tensors."""

_CODESTRAL_NEEDED = ("dim", "n_layers")
_CODESTRAL_NUMBERS = (*_CODESTRAL_NEEDED, "vocab_size", "n_groups", "pad_vocab_size_multiple")
_ONLY_OF_CODESTRAL = {"model_type": "mamba", "rms_norm": True}
"""Settings -> the value that ours has."""


def measured_sizes(
    shapes: Mapping[str, tuple[int, ...]], n_groups: int, where: Path
) -> dict[str, Any]:
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


def read_state_spaces(settings: Settings, where: Path) -> Sizes:
    """Read the sizes. Raises RequestError naming each setting that our models do not have."""
    layers = layer_settings(settings, where)
    family = _LAYERS.get(layers.get("layer", "Mamba1"))
    if family is None:
        raise RequestError(
            f"{where}: ssm_cfg.layer {layers['layer']!r} is not one that we have "
            f"({', '.join(_LAYERS)})"
        )
    faults = _others("", settings, _ONLY_OF_MODEL) + _others("ssm_cfg.", layers, _ONLY_OF_LAYERS)
    values: Settings = {n: settings[n] for n in ("d_model", "n_layer") if n in settings}
    values |= {
        "vocab_size": _padded(settings),
        "tie_embeddings": settings.get("tie_embeddings", True),
        "residual_in_fp32": settings.get("residual_in_fp32", True),
        "norm_eps": _EPSILON,
    }
    if family == "mamba":
        width = settings.get("d_model")
        values |= hf.read_rank(layers.get("dt_rank"), width, faults, "ssm_cfg.dt_rank")
    else:
        values |= hf.read_limit(layers.get("dt_limit"), faults, "ssm_cfg.dt_limit")
    names = _NAMES[family]
    values |= {ours: layers[theirs] for ours, theirs in names.items() if theirs in layers}
    called = {ours: f"ssm_cfg.{theirs}" for ours, theirs in names.items()}
    return make(family, values, where, called, faults)


def layer_settings(settings: Settings, where: Path) -> Settings:
    """Find the settings of the layers. Raises RequestError if they are no table."""
    layers = settings.get("ssm_cfg") or {}
    if not isinstance(layers, dict):
        raise RequestError(f"{where}: ssm_cfg must be a table, not {layers!r}")
    return layers


def write_state_spaces(sizes: Sizes) -> Settings:
    """Write the settings of a model. Raises RequestError for sizes that mamba-ssm has not."""
    if not isinstance(sizes, MambaConfig | Mamba2Config):
        raise RequestError(f"state-spaces: has Mamba and Mamba-2 models only, not {sizes.family}")
    if sizes.norm_eps != _EPSILON:
        raise RequestError(f"norm_eps {sizes.norm_eps}: mamba-ssm's norms have {_EPSILON} always")
    layers = {theirs: getattr(sizes, ours) for ours, theirs in _NAMES[sizes.family].items()}
    if isinstance(sizes, MambaConfig):
        layers |= {"dt_rank": sizes.dt_rank} if sizes.dt_rank else {}
    else:
        layers = {"layer": "Mamba2", **layers}
        layers |= {"dt_limit": list(sizes.dt_limit)} if sizes.is_limited else {}
        if sizes.n_groups > 1 and sizes.norm_across_groups:
            raise RequestError(
                f"n_groups: mamba-ssm normalises each group of Mamba-2's channels alone, and this "
                f"model its {sizes.n_groups} groups together, so it would not be the same model "
                f"there; only one group can be converted"
            )
    return {
        "d_model": sizes.d_model,
        "n_layer": sizes.n_layer,
        "vocab_size": sizes.vocab_size,
        "ssm_cfg": layers,
        "rms_norm": True,
        "residual_in_fp32": sizes.residual_in_fp32,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,  # vocab_size is the embedding's already
        "tie_embeddings": sizes.tie_embeddings,
    }


def _others(prefix: str, settings: Settings, only: dict[str, tuple[Any, ...]]) -> list[str]:
    """List settings that have another value than those that ours have."""
    return [
        f"{prefix}{name} {settings[name]!r}: ours has {accepted[0]!r} only"
        for name, accepted in only.items()
        if name in settings and settings[name] not in accepted
    ]


def _padded(settings: Settings) -> Any:
    """Give the rows of the embedding; what is no number is left for `make` to tell."""
    size, multiple = settings.get("vocab_size", 50277), settings.get("pad_vocab_size_multiple", 8)
    if type(size) is not int or type(multiple) is not int or multiple < 1:
        return size
    return -(-size // multiple) * multiple


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
    # What transformers cannot say, the setting below does.
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
    faults = [f"{name} is not there" for name in _CODESTRAL_NEEDED if name not in settings]
    faults += [
        f"{name} must be a whole number from 1 on, not {settings[name]!r}"
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
