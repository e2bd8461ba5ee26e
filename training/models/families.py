"""The families of models, and a model's sizes as a checkpoint keeps them. Light: no torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from training.models.hybrid_sizes import BambaConfig, GraniteHybridConfig, NemotronHConfig
from training.models.sizes import (
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    NeoXConfig,
    Sizes,
)
from training.ops.rope_scaling import RopeScaling

FAMILIES: dict[str, type[Sizes]] = {
    one.family: one
    for one in (
        *(MambaConfig, Mamba2Config),
        *(LlamaConfig, MistralConfig, MixtralConfig, NeoXConfig),
        *(BambaConfig, GraniteHybridConfig, NemotronHConfig),
    )
}


WITHOUT_EFFECT = frozenset(
    (
        *("initializer_range", "dt_min", "dt_max", "dt_init_floor"),
        *("balance_coefficient", "hidden_dropout", "attention_dropout", "chunk_size", "context"),
    )
)
"""Sizes with which weights mean the same: how random ones are drawn, how a model is trained, in
what pieces it scans, and what it is meant for."""


def identity(sizes: Sizes) -> dict[str, Any]:
    """Give the family and the sizes in plain values, as they are after a JSON file."""
    return dict(json.loads(json.dumps({"family": sizes.family, **asdict(sizes)})))


def completed(written: Mapping[str, Any]) -> dict[str, Any]:
    """Give what `identity` wrote with the sizes that are newer than it, by their defaults."""
    found = dict(written)
    defaults = {
        field.name: field.default
        for field in fields(FAMILIES.get(str(found.get("family")), Sizes))
        if field.default is not MISSING
    }
    if isinstance(found.get("rope_scaling"), dict):
        found["rope_scaling"] = asdict(RopeScaling.of(found["rope_scaling"]))
    return dict(json.loads(json.dumps(defaults | found)))
