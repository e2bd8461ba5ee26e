"""Mamba-1: sizes, names, first values, and that it is causal."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.training.test_llama import wrapping_skips_no_block
from training.errors import RequestError
from training.models import MambaConfig, build, preset
from training.models.mamba import Mamba

SMALL = MambaConfig(d_model=32, n_layer=2, vocab_size=64)


def filled(config: MambaConfig, seed: int = 1) -> Mamba:
    model = Mamba(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial(name, parameter.shape, seed))
    return model


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
        "backbone.embeddings.weight": (64, 32),
        "backbone.norm_f.weight": (32,),
        "lm_head.weight": (64, 32),
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


@pytest.mark.parametrize("name", ["mamba-tiny", "mamba2-tiny"])
def test_wrapping_skips_no_block(name: str) -> None:
    wrapping_skips_no_block(preset(name), "backbone.layers")


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
    assert abs(first(f"{mixer}dt_proj.weight")).max() <= config.dt_rank**-0.5
    out = first(f"{mixer}out_proj.weight")
    assert abs(out.std() - 1 / math.sqrt(3 * 512 * config.n_layer)) < 1e-3
    assert not torch.equal(out, first("backbone.layers.1.mixer.out_proj.weight"))
    torch.testing.assert_close(out, first(f"{mixer}out_proj.weight"), rtol=0, atol=0)


def test_first_loss_is_that_of_guessing() -> None:
    tokens = torch.randint(64, (2, 50))
    loss = filled(SMALL)(tokens[:, :-1], tokens[:, 1:])
    assert abs(loss.item() - math.log(64)) < 0.1


def test_loss_equals_the_one_of_the_logits() -> None:
    model = filled(SMALL)
    tokens = torch.randint(64, (2, 50))
    logits = model(tokens[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(model(tokens[:, :-1], tokens[:, 1:]), expected)


def test_no_position_sees_the_future() -> None:
    model = filled(SMALL)
    tokens = torch.randint(64, (1, 40))
    changed = tokens.clone()
    changed[0, 25:] = (changed[0, 25:] + 1) % 64
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :25], after[:, :25], rtol=0, atol=0)
    assert not torch.allclose(before[:, 25], after[:, 25])


def test_recomputation_changes_nothing() -> None:
    tokens = torch.randint(64, (2, 30))
    gradients = []
    for recompute in (False, True):
        model = filled(SMALL)
        for block in model.blocks:
            block.recompute = recompute
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again, rtol=0, atol=0)


def test_residual_stream_stays_float32_under_bfloat16_weights() -> None:
    model = filled(SMALL).bfloat16()
    seen = []
    model.blocks[1].register_forward_hook(lambda *call: seen.append(call[2].dtype))
    assert model(torch.randint(64, (1, 9))).dtype == torch.bfloat16
    assert seen == [torch.float32]
