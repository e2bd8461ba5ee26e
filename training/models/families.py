"""Model families, and a model's sizes in the form that checkpoints store. No torch needed here."""

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
"""Sizes that do not change what weights mean: they only affect initialization, training, the size
of the scan's chunks, or the intended context."""


def identity(sizes: Sizes) -> dict[str, Any]:
    """Return the family and the sizes as plain values, as they would be read back from JSON."""
    return dict(json.loads(json.dumps({"family": sizes.family, **asdict(sizes)})))


def completed(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `identity` wrote, with defaults for the sizes that did not exist then."""
    found = dict(written)
    defaults = {
        field.name: field.default
        for field in fields(FAMILIES.get(str(found.get("family")), Sizes))
        if field.default is not MISSING
    }
    if isinstance(found.get("rope_scaling"), dict):
        found["rope_scaling"] = asdict(RopeScaling.of(found["rope_scaling"]))
    return dict(json.loads(json.dumps(defaults | found)))
