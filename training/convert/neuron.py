"""The config.json of the Neuron system's Mamba-2 and our sizes. Light: no torch here.

It is Hugging Face's with settings beside: rmsnorm_within_groups says that the gated norm takes the
mean square of each group of channels, as our norm_across_groups=False does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from training.convert import hf
from training.errors import RequestError
from training.models import Mamba2Config, Sizes

WITHIN = "rmsnorm_within_groups"


def read(settings: dict[str, Any], where: Path) -> Sizes:
    """Read the sizes. Raises RequestError naming each setting that our models do not have."""
    faults = []
    if settings.get("model_type", "mamba2") != "mamba2":
        faults.append(f"model_type {settings['model_type']!r}: the Neuron system has mamba2 only")
    if settings.get("rms_norm", True) is not True:
        faults.append(f"rms_norm {settings['rms_norm']!r}: ours has True only")
    if faults:
        raise RequestError.of([f"{where}: {fault}" for fault in faults])
    return hf.read({WITHIN: True, **settings, "model_type": "mamba2"}, where)


def write(sizes: Sizes) -> dict[str, Any]:
    """Write the settings of a model. Raises RequestError if it is not of Mamba-2."""
    if not isinstance(sizes, Mamba2Config):
        raise RequestError(f"neuron: has Mamba-2 models only, not {sizes.family}")
    # What transformers cannot say, the setting below does.
    settings = hf.write(replace(sizes, norm_across_groups=True))
    return settings | {
        "time_step_rank": math.ceil(sizes.d_model / 16),
        "rms_norm": True,
        WITHIN: not sizes.norm_across_groups,
    }
