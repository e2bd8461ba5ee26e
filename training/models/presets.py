"""Named model sizes. No torch needed here."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from training.errors import RequestError
from training.models.hybrid_sizes import BambaConfig, GraniteHybridConfig, NemotronHConfig
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


def _granite(d_model: int, pattern: str, logits_scaling: float, **sizes: Any) -> Sizes:
    """Return the sizes of a Granite 4 H model: those common to all published ones, and its own."""
    common: dict[str, Any] = {
        "n_mamba_head": d_model // 32,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
    }
    return GraniteHybridConfig(
        d_model=d_model,
        n_layer=len(pattern),
        pattern=pattern,
        initializer_range=0.1,
        logits_scaling=logits_scaling,
        **(common | sizes),
    )


def _nemotron(d_model: int, pattern: str, n_head: int, **sizes: Any) -> Sizes:
    return NemotronHConfig(
        d_model=d_model,
        n_layer=len(pattern),
        pattern=pattern,
        n_head=n_head,
        n_kv_head=8,
        head_dim=128,
        **sizes,
    )


_TENTHS = "MMMMM*MMMM" * 4  # attention at layers 5, 15, 25 and 35
_SIXTHS = "M-M-M-M-M*-"
_SMALL_H = f"M-M-M-M*-{_SIXTHS * 3}M-M-M-M-M-"
_HYBRIDS: dict[str, Sizes] = {
    "bamba-9b": BambaConfig(
        d_model=4096,
        n_layer=32,
        pattern="MMMMMMMMM*MMMMMMMM*MMMMMMMM*MMMM",  # attention at 9, 18 and 27
        n_head=32,
        n_kv_head=8,
        d_ff=14336,
        n_mamba_head=128,
        context=4096,
    ),
    "granite-4.0-h-350m": _granite(
        768,
        "MMMMMMMMMM*MM*MMM*MMMMMMMMM*MMMM",
        3.0,
        n_head=12,
        n_kv_head=4,
        d_ff=2048,
        n_mamba_head=48,
        mamba_head_dim=32,
        residual_multiplier=0.246,
        context=32768,
    ),
    "granite-4.0-h-1b": _granite(1536, _TENTHS, 6.0, n_head=12, n_kv_head=4, d_ff=4096),
    "granite-4.0-h-micro": _granite(2048, _TENTHS, 8.0, n_head=32, n_kv_head=8, d_ff=8192),
    "granite-4.0-h-tiny": _granite(
        1536,
        _TENTHS,
        6.0,
        n_head=12,
        n_kv_head=4,
        d_ff=1024,
        n_expert=64,
        top_k=6,
        d_expert=512,
    ),
    "granite-4.0-h-small": _granite(
        4096,
        _TENTHS,
        16.0,
        n_head=32,
        n_kv_head=8,
        d_ff=1536,
        n_expert=72,
        top_k=10,
        d_expert=768,
    ),
    "nemotron-h-4b": _nemotron(3072, _SMALL_H, 32, d_ff=12288, n_mamba_head=112),
    "nemotron-h-8b": _nemotron(4096, _SMALL_H, 32, d_ff=21504, n_mamba_head=128),
    "nemotron-h-47b": _nemotron(
        8192,
        "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-"
        "M-M-M-M-M-",
        64,
        **{"d_ff": 30720, "n_mamba_head": 256, "d_state": 256},
    ),
    "nemotron-h-56b": _nemotron(
        8192,
        f"M-M-M-M*-{_SIXTHS * 9}M-M-M-M-M-",
        64,
        **{"d_ff": 32768, "n_mamba_head": 256, "d_state": 256},
    ),
    "nemotron-nano-9b-v2": _nemotron(
        4480,
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        40,
        **{"d_ff": 15680, "n_mamba_head": 128, "mamba_head_dim": 80, "context": 131072},
    ),
    "nemotron-nano-12b-v2": _nemotron(
        5120,
        "M-M-M-M*-" * 6 + "M-M-M-M-",
        40,
        **{"d_ff": 20480, "n_mamba_head": 128, "mamba_head_dim": 80, "context": 131072},
    ),
}
_ALSO = {"mamba_9.8b": "bamba-9b"}
"""Other names for presets: the model_variant of fms-fsdp."""

_TINY_HYBRID: dict[str, Any] = {
    **{"d_model": 128, "vocab_size": 256, "n_head": 4, "n_kv_head": 2},
    **{"n_mamba_head": 8, "mamba_head_dim": 32, "d_state": 32, "chunk_size": 64},
}

PRESETS: dict[str, Sizes] = {
    # Tokens are bytes; 80 steps of 8 x 128 bytes take ten seconds on two cores.
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
    "bamba-tiny": BambaConfig(**_TINY_HYBRID, n_layer=3, pattern="M*M", d_ff=352),
    "granitemoehybrid-tiny": GraniteHybridConfig(
        **_TINY_HYBRID,
        n_layer=3,
        pattern="M*M",
        d_ff=96,
        n_expert=4,
        top_k=2,
        d_expert=96,
        embedding_multiplier=12.0,
        residual_multiplier=0.5,
        logits_scaling=0.5,
    ),
    "nemotron_h-tiny": NemotronHConfig(
        **_TINY_HYBRID, n_layer=5, pattern="M-M*-", d_ff=352, n_groups=2
    ),
    **{f"state-spaces/mamba-{size}": config for size, config in _MAMBA.items()},
    **{f"state-spaces/mamba2-{size}": config for size, config in _MAMBA2.items()},
    # The largest of AWS's Mamba-2 models for Neuron: one group for each of the 8 cores sharing it.
    "mamba2-7b": Mamba2Config(d_model=4096, n_layer=64, head_dim=128, n_groups=8),
    **_HYBRIDS,
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
    """Look up the sizes of a named model; `...-hf` is the same model's other name on the hub.

    Raises RequestError for an unknown name, suggesting the nearest known one.
    """
    found = PRESETS.get(_ALSO.get(name, name.removesuffix("-hf")))
    if found is None:
        near = get_close_matches(name, PRESETS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RequestError(
            f"model_name: no model is called {name!r}{hint} (known: {', '.join(PRESETS)})"
        )
    return found
