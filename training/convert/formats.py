"""mamba-ssm's config.json and our sizes. Light: no torch here.

Its norms have an epsilon of 1e-5, always; its vocabulary is the tokens', and the embedding is
padded to a multiple. Mamba-2's gated norm works on each group alone.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from training.convert.config import make
from training.errors import RequestError
from training.models import Mamba2Config, MambaConfig, Sizes

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
_ONLY: dict[str, tuple[Any, ...]] = {
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
    "dt_limit": (None, [0.0, math.inf]),
}
"""The same for those of ssm_cfg."""


def read(settings: Settings, where: Path) -> Sizes:
    """Read the sizes. Raises RequestError naming each setting that our models do not have."""
    layers = layer_settings(settings, where)
    family = _LAYERS.get(layers.get("layer", "Mamba1"))
    if family is None:
        raise RequestError(
            f"{where}: ssm_cfg.layer {layers['layer']!r} is not one that we have "
            f"({', '.join(_LAYERS)})"
        )
    faults = _others("", settings, _ONLY) + _others("ssm_cfg.", layers, _ONLY_OF_LAYERS)
    width = settings.get("d_model")
    rank = layers.get("dt_rank", "auto")
    if rank != "auto" and isinstance(width, int) and rank != math.ceil(width / 16):
        faults.append(f"ssm_cfg.dt_rank {rank}: ours is always d_model / 16, rounded up")
    values: Settings = {n: settings[n] for n in ("d_model", "n_layer") if n in settings}
    values |= {
        "vocab_size": _padded(settings),
        "tie_embeddings": settings.get("tie_embeddings", True),
        "residual_in_fp32": settings.get("residual_in_fp32", True),
        "norm_eps": _EPSILON,
    }
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


def write(sizes: Sizes) -> Settings:
    """Write the settings of a model. Raises RequestError for sizes that mamba-ssm has not."""
    if not isinstance(sizes, MambaConfig | Mamba2Config):
        raise RequestError(f"state-spaces: has Mamba and Mamba-2 models only, not {sizes.family}")
    if sizes.norm_eps != _EPSILON:
        raise RequestError(f"norm_eps {sizes.norm_eps}: mamba-ssm's norms have {_EPSILON} always")
    layers = {theirs: getattr(sizes, ours) for ours, theirs in _NAMES[sizes.family].items()}
    if isinstance(sizes, Mamba2Config):
        layers = {"layer": "Mamba2", **layers}
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
