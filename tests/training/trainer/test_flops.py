"""Operations by formula, against the layers of the models themselves."""

import pytest
import torch
from torch import nn

from training.models import MistralConfig, MixtralConfig, NeoXConfig, build, preset
from training.trainer import flops

NEOX = NeoXConfig(d_model=64, n_layer=3, vocab_size=100, n_head=4, d_ff=256)


@pytest.mark.parametrize(
    "name",
    ["state-spaces/mamba-130m", "state-spaces/mamba2-130m", "mamba2-7b", "llama2-70b", ""],
)
def test_weights_are_those_of_the_linear_layers(name: str) -> None:
    sizes = preset(name) if name else NEOX
    with torch.device("meta"):
        model = build(sizes)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert flops.weights(sizes) == sum(layer.weight.numel() for layer in layers)


def test_of_the_experts_only_those_that_are_chosen_count() -> None:
    sizes = preset("mixtral-8x7b")
    assert isinstance(sizes, MixtralConfig)
    with torch.device("meta"):
        model = build(sizes)
    all_ = sum(p.numel() for n, p in model.named_parameters() if p.dim() > 1)
    idle = (sizes.n_expert - sizes.top_k) * 3 * sizes.d_model * sizes.d_ff * sizes.n_layer
    embedding = sizes.vocab_size * sizes.d_model
    assert flops.weights(sizes) == all_ - idle - embedding


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
