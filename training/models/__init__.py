"""Named model sizes. Light: nothing here needs torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches

from training.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Sizes of a Mamba-1 language model (Gu & Dao 2023, section 3.4 and appendix E.2)."""

    d_model: int
    n_layer: int
    vocab_size: int = 50280  # GPT-NeoX's 50277 tokens, padded to a multiple of 8
    d_state: int = 16
    d_conv: int = 4
    expand: int = 2
    norm_eps: float = 1e-5
    residual_in_fp32: bool = True
    initializer_range: float = 0.02
    dt_min: float = 1e-3
    dt_max: float = 1e-1
    dt_init_floor: float = 1e-4

    @property
    def d_inner(self) -> int:
        return self.expand * self.d_model

    @property
    def dt_rank(self) -> int:
        return math.ceil(self.d_model / 16)


_SIZES = {
    "130m": MambaConfig(d_model=768, n_layer=24),
    "370m": MambaConfig(d_model=1024, n_layer=48),
    "790m": MambaConfig(d_model=1536, n_layer=48),
    "1.4b": MambaConfig(d_model=2048, n_layer=48),
    "2.8b": MambaConfig(d_model=2560, n_layer=64),
}

PRESETS: dict[str, MambaConfig] = {
    # Bytes as tokens; 80 steps of 8 x 128 bytes take ten seconds on two cores.
    "mamba-tiny": MambaConfig(d_model=128, n_layer=2, vocab_size=256),
    **{f"state-spaces/mamba-{size}": config for size, config in _SIZES.items()},
}


def preset(name: str) -> MambaConfig:
    """Look up the sizes of a named model; `...-hf` is the same model under its other hub name.

    Raises RequestError for an unknown name, with the nearest one.
    """
    found = PRESETS.get(name.removesuffix("-hf"))
    if found is None:
        near = get_close_matches(name, PRESETS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RequestError(
            f"model_name: no model is called {name!r}{hint} (known: {', '.join(PRESETS)})"
        )
    return found
