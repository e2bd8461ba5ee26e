"""Mamba-1: against transformers; its sizes, names, initial values, generation, causality."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

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
from training.models import MambaConfig, build, preset
from training.models.mamba import Mamba

SMALL = MambaConfig(d_model=32, n_layer=2, vocab_size=61)
BIASES = like(SMALL, bias=True)
CONFIGS = {
    "plain": SMALL,
    "biases": BIASES,
    "no bias of the convolution": like(SMALL, d_model=48, conv_bias=False, d_conv=3),
    "untied": like(SMALL, n_layer=3, tie_embeddings=False, d_state=5, expand=3),
}


def theirs_of(config: MambaConfig) -> Any:
    """Make Hugging Face's model of the same sizes, in which every value matters."""
    return randomised(
        transformers.MambaForCausalLM(
            transformers.MambaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.d_model,
                state_size=config.d_state,
                num_hidden_layers=config.n_layer,
                layer_norm_epsilon=config.norm_eps,
                expand=config.expand,
                conv_kernel=config.d_conv,
                use_bias=config.bias,
                use_conv_bias=config.conv_bias,
                time_step_rank=config.d_delta,
                residual_in_fp32=config.residual_in_fp32,
                tie_word_embeddings=config.tie_embeddings,
                use_cache=False,
            )
        )
    )


@pytest.mark.parametrize("length", [2, 37])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_equals_transformers(config: MambaConfig, length: int) -> None:
    compare(build(config), theirs_of(config), length=length)


# With biased projections, theirs sees padding that precedes the text.
@pytest.mark.parametrize(("config", "kind"), [(SMALL, "left"), (SMALL, "right"), (BIASES, "right")])
def test_equals_transformers_where_there_is_padding(config: MambaConfig, kind: str) -> None:
    compare(build(config), theirs_of(config), kind=kind)


def test_a_text_after_padding_is_the_text_alone() -> None:
    model = filled(BIASES)
    tokens = torch.randint(61, (1, 20))
    padded = model(tokens, mask=torch.arange(20)[None] >= 7)
    torch.testing.assert_close(padded[:, 7:], model(tokens[:, 7:]))


@pytest.mark.parametrize("split", [(21,), (1,) * 21, (3, 1, 17)])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_advance_equals_forward(config: MambaConfig, split: tuple[int, ...]) -> None:
    advances_like_forward(filled(config), split)


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("130m", 129_135_360),
        ("370m", 371_516_416),
        ("790m", 793_204_224),
        ("1.4b", 1_372_178_432),
        ("2.8b", 2_768_345_600),
    ],
)
def test_parameter_counts_are_the_published_ones(size: str, count: int) -> None:
    for name in (f"state-spaces/mamba-{size}", f"state-spaces/mamba-{size}-hf"):
        with torch.device("meta"):
            model = build(preset(name))
        assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_parameter_names_are_those_of_the_published_checkpoints() -> None:
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in Mamba(SMALL).state_dict().items()}
    mixer = "backbone.layers.1.mixer."
    expected = {
        "backbone.embeddings.weight": (61, 32),
        "backbone.norm_f.weight": (32,),
        "lm_head.weight": (61, 32),
        "backbone.layers.1.norm.weight": (32,),
        f"{mixer}A_log": (64, 16),
        f"{mixer}D": (64,),
        f"{mixer}conv1d.weight": (64, 1, 4),
        f"{mixer}conv1d.bias": (64,),
        f"{mixer}in_proj.weight": (128, 32),
        f"{mixer}x_proj.weight": (34, 64),
        f"{mixer}dt_proj.weight": (64, 2),
        f"{mixer}dt_proj.bias": (64,),
        f"{mixer}out_proj.weight": (32, 64),
    }
    assert {n: s for n, s in shapes.items() if ".layers.0." not in n} == expected


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"did you mean state-spaces/mamba-130m\?"):
        preset("state-space/mamba-130")


def test_first_values_follow_the_paper() -> None:
    config = MambaConfig(d_model=256, n_layer=4)
    model = Mamba(config)

    def first(name: str) -> torch.Tensor:
        return model.initial(name, model.get_parameter(name).shape, seed=7)

    mixer = "backbone.layers.0.mixer."
    step = F.softplus(first(f"{mixer}dt_proj.bias"))
    assert config.dt_min * 0.999 <= step.min() and step.max() <= config.dt_max * 1.001
    assert abs(step.log().mean() - math.log(0.01)) < 0.2  # uniform in the logarithm
    torch.testing.assert_close(first(f"{mixer}A_log").exp()[3], torch.arange(1.0, 17.0))
    assert (first(f"{mixer}D") == 1).all() and (first("backbone.norm_f.weight") == 1).all()
    assert abs(first("backbone.embeddings.weight").std() - 0.02) < 1e-3
    assert abs(first(f"{mixer}dt_proj.weight")).max() <= config.d_delta**-0.5
    out = first(f"{mixer}out_proj.weight")
    assert abs(out.std() - 1 / math.sqrt(3 * 512 * config.n_layer)) < 1e-3
    assert not torch.equal(out, first("backbone.layers.1.mixer.out_proj.weight"))
    torch.testing.assert_close(out, first(f"{mixer}out_proj.weight"), rtol=0, atol=0)


def test_first_loss_is_that_of_guessing() -> None:
    tokens = torch.randint(61, (2, 50))
    loss = filled(SMALL)(tokens[:, :-1], tokens[:, 1:])
    assert abs(loss.item() - math.log(61)) < 0.1


def test_loss_equals_the_one_of_the_logits() -> None:
    model = filled(SMALL)
    tokens = torch.randint(61, (2, 50))
    logits = model(tokens[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(model(tokens[:, :-1], tokens[:, 1:]), expected)


def test_no_position_sees_the_future() -> None:
    model = filled(SMALL)
    tokens = torch.randint(61, (1, 40))
    changed = tokens.clone()
    changed[0, 25:] = (changed[0, 25:] + 1) % 61
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :25], after[:, :25], rtol=0, atol=0)
    assert not torch.allclose(before[:, 25], after[:, 25])


def test_recomputation_changes_nothing() -> None:
    recomputation_changes_nothing(SMALL)


def test_wrapping_skips_no_block() -> None:
    wrapping_skips_no_block(SMALL, "backbone.layers")


def test_residual_stream_stays_float32_under_bfloat16_weights() -> None:
    model = filled(SMALL).bfloat16()
    seen = []
    model.blocks[1].register_forward_hook(lambda *call: seen.append(call[2].dtype))
    assert model(torch.randint(61, (1, 9))).dtype == torch.bfloat16
    assert seen == [torch.float32]
