"""GPT-NeoX against Hugging Face's own, its dropouts, and generation."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.training.support.families import (
    advances_like_forward,
    compare,
    filled,
    like,
    randomised,
    recomputation_changes_nothing,
    wrapping_skips_no_block,
)
from training.errors import RequestError
from training.models import NeoXConfig, build

SMALL = NeoXConfig(d_model=32, n_layer=2, vocab_size=61, n_head=4, d_ff=80, rotary_pct=0.5)


def theirs_of(config: NeoXConfig) -> Any:
    """Make Hugging Face's model of the same sizes."""
    ways: dict[str, Any] = {"attn_implementation": "eager"}
    sizes = transformers.GPTNeoXConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        intermediate_size=config.d_ff,
        layer_norm_eps=config.norm_eps,
        use_parallel_residual=config.parallel_residual,
        attention_bias=config.attention_bias,
        hidden_dropout=config.hidden_dropout,
        attention_dropout=config.attention_dropout,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.rotary_pct,
        },
        tie_word_embeddings=config.tie_embeddings,
        **ways,
    )
    return transformers.GPTNeoXForCausalLM(sizes)


def renamed(theirs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """In their memory, the output embedding has another name than in the checkpoints."""
    return {name.replace("lm_head.", "embed_out."): value for name, value in theirs.items()}


@pytest.mark.parametrize("kind", ["", "left", "right"])
@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        like(SMALL, parallel_residual=False, rotary_pct=0.25),
        like(SMALL, attention_bias=False, rotary_pct=1.0, rope_theta=500.0),
        like(SMALL, n_head=2, d_model=24, norm_eps=1e-3, tie_embeddings=True),
    ],
)
def test_equals_transformers(config: NeoXConfig, kind: str) -> None:
    compare(build(config), randomised(theirs_of(config)), renamed, kind=kind)


@pytest.mark.parametrize("way", ["sdpa", "torch"])
def test_equals_transformers_by_every_way(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setenv("TRAINING_OPS", f"attention={way}")
    compare(build(SMALL), randomised(theirs_of(SMALL)), renamed, length=23)


@pytest.mark.parametrize("part", ["hidden_dropout", "attention_dropout"])
def test_dropouts_are_applied_in_training_mode_only(part: str) -> None:
    tokens = torch.randint(61, (2, 40))
    plain, dropping = filled(SMALL), filled(like(SMALL, **{part: 0.3}))
    first, second = dropping(tokens), dropping(tokens)
    assert not torch.allclose(first, second)
    torch.testing.assert_close(dropping.eval()(tokens), plain(tokens))


@pytest.mark.parametrize("config", [SMALL, like(SMALL, hidden_dropout=0.2, attention_dropout=0.2)])
def test_recomputation_changes_nothing(config: NeoXConfig) -> None:
    recomputation_changes_nothing(config)


@pytest.mark.parametrize("split", [(13,), (1,) * 13, (5, 1, 7)])
@pytest.mark.parametrize("parallel", [True, False])
def test_advance_equals_forward(parallel: bool, split: tuple[int, ...]) -> None:
    advances_like_forward(filled(like(SMALL, parallel_residual=parallel)), split)


def test_wrapping_skips_no_block() -> None:
    wrapping_skips_no_block(SMALL, "gpt_neox.layers")


def test_parameter_count_is_that_of_the_published_20b() -> None:
    sizes = NeoXConfig(d_model=6144, n_layer=44, n_head=64, d_ff=24576)
    with torch.device("meta"):
        model = build(sizes)
    assert sum(parameter.numel() for parameter in model.parameters()) == 20_554_567_680


def test_first_values() -> None:
    model = build(like(SMALL, d_model=256, d_ff=1024, n_layer=8))

    def first(name: str) -> Tensor:
        return model.initial(name, model.get_parameter(name).shape, seed=7)

    layer = "gpt_neox.layers.3."
    assert abs(first(f"{layer}attention.query_key_value.weight").std() - 0.02) < 1e-3
    assert abs(first(f"{layer}attention.dense.weight").std() - 0.02 / 4) < 1e-4
    assert abs(first(f"{layer}mlp.dense_4h_to_h.weight").std() - 0.02 / 4) < 1e-4
    assert (first(f"{layer}mlp.dense_h_to_4h.bias") == 0).all()
    assert (first(f"{layer}input_layernorm.bias") == 0).all()
    assert (first("gpt_neox.final_layer_norm.weight") == 1).all()


def test_more_than_all_channels_cannot_turn() -> None:
    with pytest.raises(RequestError, match=r"rotary_pct: must be from 0 to 1, not 1\.5"):
        like(SMALL, rotary_pct=1.5)
