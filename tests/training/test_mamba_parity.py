"""Mamba-1 equal to transformers' MambaForCausalLM, and generation equal to the whole forward."""

import pytest
import torch
from transformers import MambaConfig as TheirConfig
from transformers import MambaForCausalLM

from tests.training.parity import compare, filled
from training.models import MambaConfig
from training.models.mamba import Mamba

CONFIGS = {
    "plain": MambaConfig(d_model=32, n_layer=2, vocab_size=61),
    "biases": MambaConfig(d_model=32, n_layer=2, vocab_size=61, bias=True),
    "no bias of the convolution": MambaConfig(
        d_model=48, n_layer=2, vocab_size=40, conv_bias=False, d_conv=3
    ),
    "untied": MambaConfig(
        d_model=40, n_layer=3, vocab_size=50, tie_embeddings=False, d_state=5, expand=3
    ),
}


def pair(config: MambaConfig) -> tuple[Mamba, MambaForCausalLM]:
    ours = Mamba(config)
    filled(ours)
    theirs = MambaForCausalLM(
        TheirConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            state_size=config.d_state,
            num_hidden_layers=config.n_layer,
            layer_norm_epsilon=config.norm_eps,
            expand=config.expand,
            conv_kernel=config.d_conv,
            use_bias=config.bias,
            use_conv_bias=config.conv_bias,
            time_step_rank=config.dt_rank,
            residual_in_fp32=config.residual_in_fp32,
            tie_word_embeddings=config.tie_embeddings,
        )
    ).eval()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("length", [1, 2, 37])
def test_it_equals_transformers(name: str, length: int) -> None:
    ours, theirs = pair(CONFIGS[name])
    tokens = torch.randint(CONFIGS[name].vocab_size, (2, length))
    compare(ours, theirs, tokens)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_seen(side: str) -> None:
    # With a bias of the projections theirs sees padding that stands before the text.
    ours, theirs = pair(CONFIGS["plain" if side == "left" else "biases"])
    tokens = torch.randint(61, (3, 20))
    mask = torch.arange(20) < torch.tensor([[20], [13], [6]])
    compare(ours, theirs, tokens, mask.flip(1) if side == "left" else mask)


def test_a_text_after_padding_is_the_text_alone() -> None:
    ours, _ = pair(CONFIGS["biases"])
    tokens = torch.randint(61, (1, 20))
    padded = ours(tokens, mask=torch.arange(20)[None] >= 7)
    torch.testing.assert_close(padded[:, 7:], ours(tokens[:, 7:]))


@pytest.mark.parametrize("parts", [[1] * 21, [21], [3, 1, 17]])
def test_going_on_from_a_state_equals_the_whole(parts: list[int]) -> None:
    ours, _ = pair(CONFIGS["untied"])
    tokens = torch.randint(50, (2, 21))
    whole = ours(tokens)
    states = ours.start(2, 21)
    seen = 0
    for part in tokens.split(parts, dim=1):
        seen += part.shape[1]
        torch.testing.assert_close(
            ours.advance(part, states), whole[:, seen - 1], rtol=1e-4, atol=1e-5
        )
