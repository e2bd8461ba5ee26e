"""The sizes of the models named by the Mamba-2 system for Neuron. No torch needed here.

Heads have 128 channels. The system's programs make one group per rank that shares a layer, so that
another number of ranks gives another model; here the number of groups belongs to the model.
"""

from __future__ import annotations

import math
from difflib import get_close_matches

from training.errors import RequestError
from training.models import Mamba2Config

MODELS = {
    "Mamba130M": (768, 24),
    "Mamba370M": (1024, 48),
    "Mamba780M": (1536, 48),
    "Mamba1B": (2048, 48),
    "Mamba3B": (2560, 64),
    "Mamba7B": (4096, 64),
}
"""Name -> d_model, n_layer."""
HEAD_DIM, INITIALIZER_RANGE = 128, 0.1


MOST_GROUPS = 8
"""A model's default number of groups, at most: as many ranks can then share a layer."""


def sizes(
    name: str, vocab_size: int, n_groups: int = 0, norm_across_groups: bool = False
) -> Mamba2Config:
    """Make the sizes of one of the system's models.

    n_groups: 0 for the greatest common divisor of 8 and the number of heads.

    Raises RequestError for an unknown name, suggesting the nearest known one, or if the groups do
    not divide the heads.
    """
    if name not in MODELS:
        near = get_close_matches(name, MODELS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RequestError(f"model: no model is called {name!r}{hint} (known: {', '.join(MODELS)})")
    d_model, n_layer = MODELS[name]
    return Mamba2Config(
        d_model=d_model,
        n_layer=n_layer,
        vocab_size=vocab_size,
        head_dim=HEAD_DIM,
        n_groups=n_groups or math.gcd(MOST_GROUPS, 2 * d_model // HEAD_DIM),
        norm_across_groups=norm_across_groups,
        initializer_range=INITIALIZER_RANGE,
    )
