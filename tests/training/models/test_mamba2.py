"""Mamba-2: against transformers; its sizes, names, initial values, generation, causality.

transformers computes the gated norm over all channels, so it is the reference for that; the norm by
group is compared with a model written here, one step after the other.
"""

# ruff: noqa: N806  (A, B, C, D are the paper's own names)
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.training.support.families import (
    advances_like_forward,
    filled,
    recomputation_changes_nothing,
    wrapping_skips_no_block,
)
from training.errors import RequestError
from training.models import Mamba2Config, build, preset
from training.models.mamba2 import Mamba2

SMALL = Mamba2Config(
    d_model=32, n_layer=2, vocab_size=61, d_state=8, head_dim=16, n_groups=2, chunk_size=16
)
ACROSS = replace(SMALL, norm_across_groups=True)
CONFIGS = {
    "plain": replace(ACROSS, n_groups=1),
    "groups": ACROSS,
    "a group a head": replace(ACROSS, n_groups=4),
    "biases": replace(ACROSS, bias=True),
    "no bias of the convolution": replace(ACROSS, conv_bias=False),
    "untied": replace(ACROSS, tie_embeddings=False),
    "odd sizes": replace(ACROSS, d_model=24, expand=3, head_dim=12, n_groups=3, d_state=5),
    "short convolution": replace(ACROSS, d_conv=2, residual_in_fp32=False, norm_eps=1e-3),
}


def random_model(config: Mamba2Config) -> Any:
    """Make a model whose parameters all matter: norms are not one, biases are not zero."""
    model = filled(config)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "A_log" not in name:
                parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.3)
            if "embeddings" in name or "lm_head" in name:
                parameter.mul_(20)
    return model


def reference(model: Mamba2) -> Any:
    """Make the same model with transformers."""
    c = model.config
    theirs = transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(
            hidden_size=c.d_model,
            num_hidden_layers=c.n_layer,
            vocab_size=c.vocab_size,
            state_size=c.d_state,
            conv_kernel=c.d_conv,
            expand=c.expand,
            head_dim=c.head_dim,
            num_heads=c.n_head,
            n_groups=c.n_groups,
            chunk_size=c.chunk_size,
            use_bias=c.bias,
            use_conv_bias=c.conv_bias,
            residual_in_fp32=c.residual_in_fp32,
            layer_norm_epsilon=c.norm_eps,
            tie_word_embeddings=c.tie_embeddings,
            use_cache=False,
        )
    )
    theirs.load_state_dict(model.state_dict(), strict=True)
    return theirs.eval()


def distance(found: Tensor | None, wanted: Tensor | None) -> float:
    assert found is not None and wanted is not None
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("length", [2, 131])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_it_computes_what_transformers_computes(config: Mamba2Config, length: int) -> None:
    model = random_model(config)
    theirs = reference(model)
    tokens = torch.randint(config.vocab_size, (2, length + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits, wanted = model(inputs), theirs(inputs).logits
    assert wanted.std() > 1  # not a comparison of zeros
    assert (logits - wanted).abs().max() <= 1e-4
    loss = model(inputs, targets)
    expected = F.cross_entropy(wanted.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in model.named_parameters():
        assert distance(parameter.grad, gradients[name]) <= 1e-3, name


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_padding_is_not_seen(config: Mamba2Config, side: str) -> None:
    model = random_model(config)
    tokens = torch.randint(config.vocab_size, (3, 20))
    mask = torch.ones(3, 20, dtype=torch.bool)
    for row, padding in enumerate((0, 3, 11)):
        mask[row, slice(padding) if side == "left" else slice(20 - padding, None)] = False
    found = model(tokens, mask=mask)
    # With biased projections, theirs sees padding that precedes the text.
    if side == "right" or not config.bias:
        wanted = reference(model)(tokens, attention_mask=mask.long()).logits
        assert (found - wanted)[mask].abs().max() <= 1e-4
    other = torch.where(mask, tokens, (tokens + 1) % config.vocab_size)
    torch.testing.assert_close(model(other, mask=mask)[mask], found[mask])
    alone = model(tokens[2:3, mask[2]])[0]
    torch.testing.assert_close(found[2, mask[2]], alone, rtol=0, atol=1e-4)


def by_steps(model: Mamba2, tokens: Tensor) -> Tensor:
    """Return logits (b, l, v) by the equations, one position after the other, in float64."""
    c = model.config
    w = {name: value.double() for name, value in model.state_dict().items()}

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + c.norm_eps)

    hidden = w["backbone.embeddings.weight"][tokens]  # (b, l, m)
    for layer in range(c.n_layer):
        own = {n.split(f"layers.{layer}.")[1]: v for n, v in w.items() if f".{layer}." in n}
        state = torch.zeros(len(tokens), c.n_head, c.head_dim, c.d_state).double()  # (b, h, p, n)
        seen = torch.zeros(len(tokens), c.d_conv, c.d_conv_in).double()  # (b, k, d_conv_in)
        out = []
        for t in range(tokens.shape[1]):
            row = norm(hidden[:, t], own["norm.weight"]) @ own["mixer.in_proj.weight"].t()
            z, taken, dt = row.split([c.d_inner, c.d_conv_in, c.n_head], dim=-1)
            seen = torch.cat((seen[:, 1:], taken[:, None]), dim=1)  # (b, k, d_conv_in)
            convolved = (seen * own["mixer.conv1d.weight"][:, 0].t()).sum(1)  # (b, d_conv_in)
            convolved = F.silu(convolved + own["mixer.conv1d.bias"])
            shared = c.n_groups * c.d_state
            x, B, C = convolved.split([c.d_inner, shared, shared], dim=-1)
            x = x.unflatten(1, (c.n_head, c.head_dim))  # (b, h, p)
            heads = c.n_head // c.n_groups
            B, C = (
                one.unflatten(1, (c.n_groups, c.d_state)).repeat_interleave(heads, dim=1)
                for one in (B, C)
            )  # (b, h, n)
            delta = F.softplus(dt + own["mixer.dt_bias"])  # (b, h)
            decay = torch.exp(-delta * own["mixer.A_log"].exp())  # (b, h)
            state = state * decay[..., None, None]
            state = state + (delta[..., None] * x)[..., None] * B[:, :, None]  # (b, h, p, n)
            y = (state * C[:, :, None]).sum(-1) + own["mixer.D"][:, None] * x  # (b, h, p)
            gated = (y.flatten(1) * F.silu(z)).chunk(c.n_groups, dim=-1)
            weights = own["mixer.norm.weight"].chunk(c.n_groups)
            y = torch.cat([norm(*pair) for pair in zip(gated, weights, strict=True)], dim=-1)
            out.append(hidden[:, t] + y @ own["mixer.out_proj.weight"].t())
        hidden = torch.stack(out, dim=1)
    return norm(hidden, w["backbone.norm_f.weight"]) @ w["lm_head.weight"].t()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_norm_by_group_is_that_of_the_equations(groups: int) -> None:
    model = random_model(replace(SMALL, n_groups=groups))
    tokens = torch.randint(61, (2, 21))
    logits = model(tokens)
    torch.testing.assert_close(logits.double(), by_steps(model, tokens), rtol=0, atol=1e-4)
    across = Mamba2(replace(model.config, norm_across_groups=True))
    across.load_state_dict(model.state_dict())
    assert torch.allclose(across(tokens), logits) == (groups == 1)


def counted(c: Mamba2Config) -> int:
    """Count parameters by the sizes in the paper's section 7."""
    d, inner, shared = c.d_model, c.expand * c.d_model, c.n_groups * c.d_state
    heads, conv = inner // c.head_dim, inner + 2 * shared
    projections = d * (2 * inner + 2 * shared + heads) + inner * d
    layer = d + projections + conv * c.d_conv + conv + 3 * heads + inner
    return c.vocab_size * d + c.n_layer * layer + d


@pytest.mark.parametrize("size", ["130m", "370m", "780m", "1.3b", "2.7b"])
def test_parameter_counts_are_those_of_the_sizes(size: str) -> None:
    config = preset(f"state-spaces/mamba2-{size}")
    assert isinstance(config, Mamba2Config)
    with torch.device("meta"):
        model = build(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == counted(config)
    unit = {"m": 1e6, "b": 1e9}[size[-1]]
    assert abs(count / unit / float(size[:-1]) - 1) < 0.05  # as its name says


def test_parameter_count_of_the_largest_is_the_one_stated() -> None:
    with torch.device("meta"):
        model = build(preset("mamba2-7b"))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert round(count / 1e9, 3) == 7.206


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parameter_names_and_shapes_are_transformers_own(config: Mamba2Config) -> None:
    theirs = reference(random_model(config)).state_dict()
    ours = Mamba2(config).state_dict()
    assert {n: v.shape for n, v in ours.items()} == {n: v.shape for n, v in theirs.items()}


def test_embeddings_are_tied_where_the_sizes_say_so() -> None:
    tied, untied = Mamba2(SMALL), Mamba2(replace(SMALL, tie_embeddings=False))
    assert tied.tied == {"lm_head.weight": "backbone.embeddings.weight"}
    assert tied.output is tied.backbone.embeddings.weight
    assert untied.tied == {}
    assert untied.output is not untied.backbone.embeddings.weight


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RequestError, match="head_dim: 24 does not divide d_inner 64"):
        replace(SMALL, head_dim=24)
    with pytest.raises(RequestError, match="n_groups: 3 does not divide the 4 heads"):
        replace(SMALL, n_groups=3)


def test_first_values_are_those_of_the_papers_own_training() -> None:
    config = Mamba2Config(d_model=256, n_layer=4, head_dim=1, bias=True)  # 512 heads
    model = Mamba2(config)

    def first(name: str) -> Tensor:
        return model.initial(name, model.get_parameter(name).shape, seed=7)

    mixer = "backbone.layers.0.mixer."
    step = F.softplus(first(f"{mixer}dt_bias"))
    assert config.dt_min * 0.999 <= step.min() and step.max() <= config.dt_max * 1.001
    assert abs(step.log().mean() - math.log(0.01)) < 0.2  # uniform in the logarithm
    decay = first(f"{mixer}A_log").exp()
    assert 1 <= decay.min() < 1.5 and 15.5 < decay.max() <= 16.001
    assert abs(decay.mean() - 8.5) < 0.5
    for name in (f"{mixer}D", f"{mixer}norm.weight", "backbone.norm_f.weight"):
        assert (first(name) == 1).all()
    assert (first(f"{mixer}in_proj.bias") == 0).all()
    assert abs(first("backbone.embeddings.weight").std() - 0.02) < 1e-3
    for name, fan_in in (("in_proj", 256), ("conv1d", 4)):
        weight = first(f"{mixer}{name}.weight")
        assert 0.99 * fan_in**-0.5 < weight.abs().max() <= fan_in**-0.5
    out = first(f"{mixer}out_proj.weight")
    assert abs(out.std() - 1 / math.sqrt(3 * 512 * config.n_layer)) < 1e-3
    assert not torch.equal(out, first("backbone.layers.1.mixer.out_proj.weight"))
    torch.testing.assert_close(out, first(f"{mixer}out_proj.weight"), rtol=0, atol=0)


def test_first_loss_is_that_of_guessing() -> None:
    tokens = torch.randint(61, (2, 50))
    loss = filled(SMALL)(tokens[:, :-1], tokens[:, 1:])
    assert abs(loss.item() - math.log(61)) < 0.1


@pytest.mark.parametrize("split", [(75,), (1, 74), (2, 1, 67, 5), (1,) * 75])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_going_on_gives_the_logits_of_the_whole(
    config: Mamba2Config, split: tuple[int, ...]
) -> None:
    advances_like_forward(random_model(config), split)


def test_the_state_does_not_grow() -> None:
    model = filled(SMALL)
    sizes = [
        {key: value.shape for key, value in state.items()}
        for length in (1, 1000)
        for state in model.start(2, length)
    ]
    assert sizes[:2] == sizes[2:]


def test_no_position_sees_the_future() -> None:
    model = random_model(SMALL)
    tokens = torch.randint(61, (1, 90))
    changed = tokens.clone()
    changed[0, 70:] = (changed[0, 70:] + 1) % 61
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :70], after[:, :70], rtol=0, atol=1e-5)
    assert not torch.allclose(before[:, 70], after[:, 70])


def test_recomputation_changes_nothing() -> None:
    recomputation_changes_nothing(SMALL)


def test_wrapping_skips_no_block() -> None:
    wrapping_skips_no_block(SMALL, "backbone.layers")


@pytest.mark.parametrize("wide", [True, False])
def test_dtype_of_the_residual_stream_under_bfloat16_weights(wide: bool) -> None:
    model = filled(replace(SMALL, residual_in_fp32=wide)).bfloat16()
    seen = []
    model.blocks[1].register_forward_hook(lambda *call: seen.append(call[2].dtype))
    assert model(torch.randint(61, (1, 9))).dtype == torch.bfloat16
    assert seen == [torch.float32 if wide else torch.bfloat16]


def test_bfloat16_stays_close_and_goes_on() -> None:
    model = random_model(SMALL)
    tokens = torch.randint(61, (2, 40))
    wanted = model(tokens)
    model = model.bfloat16()
    assert distance(model(tokens).float(), wanted) < 0.05
    states = model.start(2, 40)
    assert [state["ssm"].dtype for state in states] == [torch.float32] * 2
    model.advance(tokens[:, :30], states)
    found = model.advance(tokens[:, 30:], states)
    assert distance(found.float(), wanted[:, -1]) < 0.05


def test_it_learns() -> None:
    """A few steps on one batch show that the gradients point in the right direction."""
    model = filled(SMALL)
    tokens = torch.randint(61, (4, 33))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
