"""Operations by formula, against the layers of the models themselves."""

from typing import Any

import pytest
import torch
from torch import nn

from training.models import BambaConfig, MistralConfig, MixtralConfig, NeoXConfig, build, preset
from training.trainer import flops

NEOX = NeoXConfig(d_model=64, n_layer=3, vocab_size=100, n_head=4, d_ff=256)


@pytest.mark.parametrize(
    "name",
    [
        *("state-spaces/mamba-130m", "state-spaces/mamba2-130m", "mamba2-7b", "llama2-70b", ""),
        *("bamba-9b", "granite-4.0-h-micro", "nemotron-nano-9b-v2"),
    ],
)
def test_weights_are_those_of_the_linear_layers(name: str) -> None:
    sizes = preset(name) if name else NEOX
    with torch.device("meta"):
        model = build(sizes)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert flops.weights(sizes) == sum(layer.weight.numel() for layer in layers)


def test_of_the_experts_only_those_that_are_chosen_count() -> None:
    for name in ("mixtral-8x7b", "granite-4.0-h-tiny"):
        sizes: Any = preset(name)
        with torch.device("meta"):
            model = build(sizes)
        # Tied embeddings are one look-up and one product.
        look_up = 0 if sizes.tie_embeddings else sizes.vocab_size * sizes.d_model
        matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and "conv1d" not in n]
        width = sizes.d_ff if isinstance(sizes, MixtralConfig) else sizes.d_expert
        idle = (sizes.n_expert - sizes.top_k) * 3 * sizes.d_model * width * sizes.n_layer
        assert flops.weights(sizes) == sum(p.numel() for p in matrices) - idle - look_up


def test_each_kind_of_layer_has_its_operations() -> None:
    made: dict[str, Any] = {
        **{"d_model": 32, "n_layer": 4, "pattern": "M*MM", "vocab_size": 10, "n_head": 4},
        **{"n_kv_head": 2, "d_ff": 8, "n_mamba_head": 8, "mamba_head_dim": 8, "d_state": 6},
    }
    sizes = BambaConfig(**made)
    attention = 12 * 4 * 8 * (8 + 1) / 2  # for the one layer: heads, channels, keys on average
    expected = 6 * flops.weights(sizes) + attention + 3 * 15 * 64 * 6
    assert flops.per_token(sizes, 8) == pytest.approx(expected)


@pytest.mark.parametrize("window", [0, 1, 3, 7, 8, 100])
def test_attention_counts_the_keys_that_are_seen(window: int) -> None:
    sizes = MistralConfig(
        d_model=32, n_layer=5, vocab_size=10, n_head=4, n_kv_head=2, d_ff=8, window=window
    )
    length = 8
    pairs = sum(min(position + 1, window or length) for position in range(length))
    expected = 6 * flops.weights(sizes) + 5 * 12 * 4 * 8 * pairs / length
    assert flops.per_token(sizes, length) == pytest.approx(expected)


def test_published_figures_come_out() -> None:
    # Llama-2-7B: 6 N + 6 l m n_layer, the usual estimate for causal attention.
    llama = flops.per_token(preset("llama2-7b"), 4096)
    assert llama == pytest.approx(6 * 6.607e9 + 6 * 4096 * 4096 * 32, rel=1e-3)
    mamba = flops.per_token(preset("state-spaces/mamba-2.8b"), 4096)
    assert mamba == pytest.approx(6 * 2.76e9 + 27 * 5120 * 16 * 64, rel=0.01)


def test_a_peak_is_found_by_a_devices_name() -> None:
    assert flops.peak("NVIDIA H100 80GB HBM3") == 989e12
    assert flops.peak("cpu") is None
