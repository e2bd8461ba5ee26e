"""Llama and Mistral against Hugging Face's own, and what training and generation need of them."""

import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.training.support.families import (
    advances_like_forward,
    compare,
    filled,
    like,
    randomised,
    recomputation_changes_nothing,
    wrapping_skips_no_block,
)
from training.models import LlamaConfig, MistralConfig, RopeScaling, build, preset
from training.ops import attention

SMALL = LlamaConfig(d_model=32, n_layer=2, vocab_size=61, n_head=4, n_kv_head=2, d_ff=48)
WINDOWED = MistralConfig(
    d_model=32, n_layer=2, vocab_size=61, n_head=4, n_kv_head=2, d_ff=48, window=5
)
LLAMA3 = RopeScaling(kind="llama3", factor=8, original_context=32)


def theirs_of(config: LlamaConfig) -> Any:
    """Make Hugging Face's model of the same sizes."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_context,
            }
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.d_head,
        "intermediate_size": config.d_ff,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": 4096,
        "attn_implementation": "eager",
        "pad_token_id": None,
    }
    if isinstance(config, MistralConfig):
        sizes = transformers.MistralConfig(**common, sliding_window=config.window or None)
        return transformers.MistralForCausalLM(sizes)
    biases: dict[str, Any] = {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **biases))


@pytest.mark.parametrize("kind", ["", "left", "right"])
@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        like(SMALL, n_kv_head=1, tie_embeddings=True, norm_eps=1e-3),
        like(SMALL, n_kv_head=4, attention_bias=True, mlp_bias=True),
        like(SMALL, head_dim=12, rope_theta=5e5, n_layer=1),
        like(SMALL, rope_scaling=RopeScaling(kind="linear", factor=3)),
        like(SMALL, rope_scaling=LLAMA3, head_dim=16, rope_theta=100.0),
        WINDOWED,
        like(WINDOWED, window=1, tie_embeddings=True),
        like(WINDOWED, window=16),
        like(WINDOWED, window=0),
    ],
)
def test_equals_transformers(config: LlamaConfig, kind: str) -> None:
    compare(build(config), randomised(theirs_of(config)), kind=kind)


@pytest.mark.parametrize("way", ["sdpa", "torch"])
@pytest.mark.parametrize("length", [3, 33])
def test_equals_transformers_by_every_way(
    monkeypatch: pytest.MonkeyPatch, way: str, length: int
) -> None:
    monkeypatch.setenv("TRAINING_OPS", f"attention={way}")
    monkeypatch.setattr(attention, "BLOCK", 8)
    for config in (SMALL, like(WINDOWED, window=7)):
        compare(build(config), randomised(theirs_of(config)), length=length)


def test_forced_ways_give_the_same_loss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention.CHOICE, "_chosen", {})  # each choice is reported once
    caplog.set_level("INFO", "training.ops")
    tokens = torch.randint(61, (2, 40))
    losses = []
    for way in ("sdpa", "torch"):
        monkeypatch.setenv("TRAINING_OPS", f"attention={way}")
        losses.append(filled(SMALL)(tokens[:, :-1], tokens[:, 1:]))
        assert f"attention: {way} on cpu, torch.float32" in caplog.messages
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("mathstral-7b", 7_248_023_552),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, count: int) -> None:
    with torch.device("meta"):
        model = build(preset(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def parameter_names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def test_tied_embeddings_are_one_parameter() -> None:
    tied, untied = build(like(SMALL, tie_embeddings=True)), build(SMALL)
    assert parameter_names(untied) - parameter_names(tied) == {"lm_head.weight"}
    assert tied.tied == {"lm_head.weight": "model.embed_tokens.weight"} and untied.tied == {}
    assert tied.output is tied.get_parameter("model.embed_tokens.weight")
    # A checkpoint contains both names all the same.
    assert tied.state_dict().keys() == untied.state_dict().keys()


def test_first_values() -> None:
    config = like(SMALL, d_model=256, d_ff=512, n_layer=8, attention_bias=True)
    model = build(config)

    def first(name: str) -> Tensor:
        return model.initial(name, model.get_parameter(name).shape, seed=7)

    layer = "model.layers.3."
    for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj"):
        assert abs(first(f"{layer}{name}.weight").std() - 0.02) < 1e-3
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert abs(first(f"{layer}{name}.weight").std() - 0.02 / 4) < 1e-4
    assert (first("model.norm.weight") == 1).all()
    assert (first(f"{layer}post_attention_layernorm.weight") == 1).all()
    assert (first(f"{layer}self_attn.q_proj.bias") == 0).all()
    again = first(f"{layer}mlp.up_proj.weight")
    torch.testing.assert_close(first(f"{layer}mlp.up_proj.weight"), again, rtol=0, atol=0)
    assert not torch.equal(again, first("model.layers.2.mlp.up_proj.weight"))


@pytest.mark.parametrize("split", [(19,), (1,) * 19, (7, 1, 1, 10), (2, 17), (4, 3, 12)])
@pytest.mark.parametrize(
    "config", [SMALL, WINDOWED, like(SMALL, rope_scaling=LLAMA3), like(WINDOWED, window=12)]
)
def test_advance_equals_forward(config: LlamaConfig, split: tuple[int, ...]) -> None:
    advances_like_forward(filled(config), split)


def test_a_window_bounds_what_is_remembered() -> None:
    states = filled(WINDOWED).start(2, 1000)
    assert [tuple(state["k"].shape) for state in states] == [(2, 5, 2, 8)] * 2


@pytest.mark.parametrize("config", [SMALL, WINDOWED])
def test_recomputation_changes_nothing(config: LlamaConfig) -> None:
    recomputation_changes_nothing(config)


def test_no_position_sees_the_future_and_a_window_forgets() -> None:
    model = filled(WINDOWED)
    tokens = torch.randint(61, (1, 40))
    changed = tokens.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 61
    same = (model(tokens) - model(changed)).abs().amax(-1)[0] < 1e-6
    # Each of the two layers looks four positions back.
    assert same[:20].all() and not same[20:29].any() and same[29:].all()


def test_wrapping_skips_no_block() -> None:
    wrapping_skips_no_block(SMALL, "model.layers")


def test_first_loss_is_that_of_guessing() -> None:
    tokens = torch.randint(61, (2, 50))
    loss = filled(SMALL)(tokens[:, :-1], tokens[:, 1:])
    assert abs(loss.item() - math.log(61)) < 0.1


def test_bfloat16_parameters_make_a_bfloat16_stream() -> None:
    model = filled(SMALL).bfloat16()
    seen: list[torch.dtype] = []
    model.blocks[1].register_forward_hook(lambda *call: seen.append(call[2].dtype))
    assert model(torch.randint(61, (1, 9))).dtype == torch.bfloat16
    assert seen == [torch.bfloat16]
    assert model.advance(torch.tensor([[3]]), model.start(1, 4)).dtype == torch.bfloat16
