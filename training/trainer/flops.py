"""Operations of a training step, by formula, and their share of a device's peak (MFU).

A multiplication and an addition are two operations. The backward pass counts twice the forward
pass; recomputation by activation checkpointing does not count. Per token:

    products     6 for each weight of a linear layer and of the output embedding that it goes
                 through (Kaplan et al. 2020, section 2.1); the input embedding is a look-up
    attention    12 h d for each key that a query sees: (l + 1) / 2 on average, less with a window
    Mamba-1      27 d_inner n per layer: 9 forward for a state of the scan (exp(delta A), delta B x,
                 the recurrence and C h)
    Mamba-2      15 d_inner n per layer: 5 forward for a state (decay, B x, their sum, C h), as a
                 recurrence; what the chunked form does beyond that does not count
    experts      those that a token is sent to, and the gate
    hybrids      layer by layer, each by its kind

No torch needed here.
"""

from __future__ import annotations

from training.models import (
    GraniteHybridConfig,
    HybridConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    NeoXConfig,
    Sizes,
)
from training.models.hybrid_sizes import ATTENTION, MAMBA

PEAKS = {
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}
"""Part of a GPU's name -> operations per second, dense bfloat16, by its SXM module's data sheet."""


def per_token(sizes: Sizes, length: int) -> float:
    """Return the operations of one step per token, for sequences of this length."""
    return 6.0 * (weights(sizes) + _between_of_all(sizes, length))


def model_tflops(parameters: int, tokens_per_second: float) -> float:
    """Return 10^12 operations per second as SMP v2 counts them: 6 per token and parameter.

    Parameters of any kind count. That is 6 x samples per second x parameters x length / devices,
    with tokens of one device.
    """
    return 6e-12 * parameters * tokens_per_second


def peak(device: str) -> float | None:
    """Return a device's nominal operations per second, by its name; None if unknown."""
    return next((rate for name, rate in PEAKS.items() if name in device), None)


def weights(sizes: Sizes) -> int:
    """Count the weights of the products that a token goes through."""
    layers = (
        sum(_of_hybrid_layer(sizes, kind) for kind in sizes.pattern)
        if isinstance(sizes, HybridConfig)
        else sizes.n_layer * _of_layer(sizes)
    )
    return layers + sizes.vocab_size * sizes.d_model


def _of_hybrid_layer(sizes: HybridConfig, kind: str) -> int:
    """Count the weights of one layer, by its letter."""
    m = sizes.d_model
    if isinstance(sizes, NemotronHConfig):
        mlp = 0
        if kind not in (MAMBA, ATTENTION):
            return 2 * m * sizes.d_ff
    else:
        mlp = 3 * m * sizes.d_ff
    if isinstance(sizes, GraniteHybridConfig) and sizes.n_expert:
        mlp += sizes.top_k * 3 * m * sizes.d_expert + m * sizes.n_expert
    if kind == MAMBA:
        return _of_layer(sizes.mamba) + mlp
    return _of_heads(sizes.attention) + mlp


def _of_layer(sizes: Sizes) -> int:
    m = sizes.d_model
    if isinstance(sizes, MambaConfig):
        d, n, rank = sizes.d_inner, sizes.d_state, sizes.d_delta
        return m * 2 * d + d * (rank + 2 * n) + rank * d + d * m
    if isinstance(sizes, Mamba2Config):
        return m * (sizes.d_inner + sizes.d_conv_in + sizes.n_head) + sizes.d_inner * m
    if isinstance(sizes, NeoXConfig):
        return 4 * m * m + 2 * m * sizes.d_ff
    assert isinstance(sizes, LlamaConfig)
    mlp = 3 * m * sizes.d_ff
    if isinstance(sizes, MixtralConfig):
        mlp = sizes.top_k * mlp + m * sizes.n_expert
    return _of_heads(sizes) + mlp


def _of_heads(sizes: LlamaConfig) -> int:
    heads = 2 * sizes.n_head + 2 * sizes.n_kv_head  # q, o and k, v
    return heads * sizes.d_head * sizes.d_model


def _between_of_all(sizes: Sizes, length: int) -> float:
    """Return the sum of `_between` over all layers."""
    if not isinstance(sizes, HybridConfig):
        return sizes.n_layer * _between(sizes, length)
    mamba, attention = (_between(one, length) for one in (sizes.mamba, sizes.attention))
    return sizes.pattern.count(MAMBA) * mamba + sizes.pattern.count(ATTENTION) * attention


def _between(sizes: Sizes, length: int) -> float:
    """Return half of a layer's forward operations per token by which positions see each other."""
    if isinstance(sizes, MambaConfig):
        return 4.5 * sizes.d_inner * sizes.d_state
    if isinstance(sizes, Mamba2Config):
        return 2.5 * sizes.d_inner * sizes.d_state
    assert isinstance(sizes, LlamaConfig | NeoXConfig)
    window = (sizes.window if isinstance(sizes, MistralConfig) else 0) or length
    window = min(window, length)
    # The first positions see 1, 2, ... window - 1 keys, all others `window`.
    keys = window - window * (window - 1) / 2 / length
    return 2.0 * sizes.n_head * sizes.d_head * keys
