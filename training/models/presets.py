"""Named model sizes. Light: nothing here needs torch."""

from __future__ import annotations

from difflib import get_close_matches

from training.errors import RequestError
from training.models.sizes import (
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Sizes,
)

_MAMBA = {
    "130m": MambaConfig(d_model=768, n_layer=24),
    "370m": MambaConfig(d_model=1024, n_layer=48),
    "790m": MambaConfig(d_model=1536, n_layer=48),
    "1.4b": MambaConfig(d_model=2048, n_layer=48),
    "2.8b": MambaConfig(d_model=2560, n_layer=64),
}
_MAMBA2 = {
    "130m": Mamba2Config(d_model=768, n_layer=24),
    "370m": Mamba2Config(d_model=1024, n_layer=48),
    "780m": Mamba2Config(d_model=1536, n_layer=48),
    "1.3b": Mamba2Config(d_model=2048, n_layer=48),
    "2.7b": Mamba2Config(d_model=2560, n_layer=64),
}
_LLAMA2 = {
    "7b": LlamaConfig(d_model=4096, n_layer=32, n_head=32, n_kv_head=32, d_ff=11008),
    "13b": LlamaConfig(d_model=5120, n_layer=40, n_head=40, n_kv_head=40, d_ff=13824),
    "70b": LlamaConfig(d_model=8192, n_layer=80, n_head=64, n_kv_head=8, d_ff=28672),
}
_LLAMA3 = {
    "8b": LlamaConfig(
        d_model=4096,
        n_layer=32,
        n_head=32,
        n_kv_head=8,
        d_ff=14336,
        vocab_size=128256,
        rope_theta=5e5,
        context=8192,
    ),
    "70b": LlamaConfig(
        d_model=8192,
        n_layer=80,
        n_head=64,
        n_kv_head=8,
        d_ff=28672,
        vocab_size=128256,
        rope_theta=5e5,
        context=8192,
    ),
}

PRESETS: dict[str, Sizes] = {
    # Bytes as tokens; 80 steps of 8 x 128 bytes take ten seconds on two cores.
    "mamba-tiny": MambaConfig(d_model=128, n_layer=2, vocab_size=256),
    "mamba2-tiny": Mamba2Config(
        d_model=128, n_layer=2, vocab_size=256, d_state=32, head_dim=32, chunk_size=64
    ),
    "llama-tiny": LlamaConfig(
        d_model=128, n_layer=2, vocab_size=256, n_head=4, n_kv_head=2, d_ff=352
    ),
    "mixtral-tiny": MixtralConfig(
        d_model=128, n_layer=2, vocab_size=256, n_head=4, n_kv_head=2, d_ff=192, n_expert=4
    ),
    **{f"state-spaces/mamba-{size}": config for size, config in _MAMBA.items()},
    **{f"state-spaces/mamba2-{size}": config for size, config in _MAMBA2.items()},
    # The largest of AWS's Mamba-2 for Neuron: one group for each of 8 cores that share it.
    "mamba2-7b": Mamba2Config(d_model=4096, n_layer=64, head_dim=128, n_groups=8),
    **{f"llama2-{size}": config for size, config in _LLAMA2.items()},
    **{f"llama3-{size}": config for size, config in _LLAMA3.items()},
    "mixtral-8x7b": MixtralConfig(
        d_model=4096,
        n_layer=32,
        n_head=32,
        n_kv_head=8,
        d_ff=14336,
        rope_theta=1e6,
        context=32768,
    ),
    "mathstral-7b": MistralConfig(
        d_model=4096,
        n_layer=32,
        n_head=32,
        n_kv_head=8,
        d_ff=14336,
        vocab_size=32768,
        rope_theta=1e6,
        window=0,
        context=32768,
    ),
}


def preset(name: str) -> Sizes:
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
