"""Language models. Importing this package loads only their sizes; `build` imports a model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from training.models.families import FAMILIES
from training.models.hybrid_sizes import (
    BambaConfig,
    GraniteHybridConfig,
    HybridConfig,
    NemotronHConfig,
)
from training.models.presets import PRESETS, preset
from training.models.sizes import (
    ACTIVATIONS,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    NeoXConfig,
    RopeScaling,
    Sizes,
)

if TYPE_CHECKING:
    from training.models.language import LanguageModel

_CLASSES = {
    "mamba": ("mamba", "Mamba"),
    "mamba2": ("mamba2", "Mamba2"),
    "llama": ("llama", "Llama"),
    "mistral": ("llama", "Llama"),
    "mixtral": ("mixtral", "Mixtral"),
    "gpt_neox": ("neox", "NeoX"),
    "bamba": ("bamba", "Bamba"),
    "granitemoehybrid": ("granite", "GraniteHybrid"),
    "nemotron_h": ("nemotron", "NemotronH"),
}
"""Family -> module and class of its model."""


def build(sizes: Sizes) -> LanguageModel:
    """Build the model of a family, with uninitialized parameters (see `LanguageModel.initial`)."""
    module, name = _CLASSES[sizes.family]
    model: LanguageModel = getattr(importlib.import_module(f"training.models.{module}"), name)(
        sizes
    )
    return model


def parameters(sizes: Sizes) -> int:
    """Count a model's parameters without allocating them."""
    import torch

    with torch.device("meta"):
        return sum(one.numel() for one in build(sizes).parameters())


__all__ = [
    "ACTIVATIONS",
    "FAMILIES",
    "PRESETS",
    "BambaConfig",
    "GraniteHybridConfig",
    "HybridConfig",
    "LlamaConfig",
    "Mamba2Config",
    "MambaConfig",
    "MistralConfig",
    "MixtralConfig",
    "NemotronHConfig",
    "NeoXConfig",
    "RopeScaling",
    "Sizes",
    "build",
    "parameters",
    "preset",
]
