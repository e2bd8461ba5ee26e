"""Bamba, Granite 4 H and Nemotron-H: against transformers, their sizes, and generation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.training.support.families import (
    advances_like_forward,
    compare,
    filled,
    like,
    randomised,
    recomputation_changes_nothing,
    wrapping_skips_no_block,
)
from training.convert import hf
from training.errors import RequestError
from training.models import (
    BambaConfig,
    GraniteHybridConfig,
    HybridConfig,
    NemotronHConfig,
    build,
    parameters,
    preset,
)
from training.ops.route import balance_loss

SMALL: dict[str, Any] = {
    **{"d_model": 32, "vocab_size": 61, "n_head": 4, "n_kv_head": 2, "d_ff": 40},
    **{"n_mamba_head": 4, "mamba_head_dim": 16, "d_state": 8, "chunk_size": 8},
}
BAMBA = BambaConfig(**SMALL, n_layer=3, pattern="M*M")
MULTIPLIERS: dict[str, Any] = {
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3},
    "logits_scaling": 1.7,
}
DENSE = GraniteHybridConfig(**SMALL, **MULTIPLIERS, n_layer=3, pattern="M*M")
GRANITE = replace(DENSE, n_expert=5, top_k=2, d_expert=24)
NEMOTRON = NemotronHConfig(**SMALL, n_layer=5, pattern="M-*M-", n_groups=2)
CONFIGS: dict[str, HybridConfig] = {
    "bamba": BAMBA,
    "bamba, otherwise": like(
        BAMBA,
        **{"pattern": "*MM", "tie_embeddings": True, "attention_bias": True, "mlp_bias": True},
        **{"bias": True, "conv_bias": False, "n_groups": 2, "n_kv_head": 4, "rope_theta": 50.0},
        **{"d_conv": 3, "dt_limit_low": 0.1, "dt_limit_high": 0.8, "norm_eps": 1e-3},
    ),
    "bamba of attention": like(BAMBA, pattern="***", head_dim=12),
    "granite": GRANITE,
    "granite without experts": DENSE,
    "granite, otherwise": like(
        GRANITE,
        **{"pattern": "**M", "rotary": True, "tie_embeddings": False, "n_groups": 4, "top_k": 1},
        **{"attention_multiplier": 0.0, "attention_bias": True, "conv_bias": False},
    ),
    "nemotron": NEMOTRON,
    "nemotron, otherwise": like(
        NEMOTRON,
        **{"pattern": "*M--M", "n_groups": 4, "head_dim": 10, "mlp_bias": True, "bias": True},
        **{"n_mamba_head": 8, "mamba_head_dim": 5, "conv_bias": False, "dt_limit_low": 0.3},
    ),
}


def reference(config: HybridConfig) -> Any:
    """Make transformers' model from the settings that a conversion writes, as it reads them."""
    settings = json.loads(json.dumps(hf.write(config)))
    ways: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = AutoConfig.for_model(settings.pop("model_type"), **settings, **ways)
    return randomised(AutoModelForCausalLM.from_config(theirs, attn_implementation="eager"))


def renamed(theirs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Convert theirs to our names; in memory, they join two matrices of an MLP or an expert."""
    ours = {}
    for name, value in theirs.items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            ours[f"{stem}w1"], ours[f"{stem}w3"] = value.chunk(2, dim=1)
        elif name.endswith("shared_mlp.input_linear.weight"):
            stem = name.removesuffix("input_linear.weight")
            first, second = value.chunk(2)
            ours |= {f"{stem}gate_proj.weight": first, f"{stem}up_proj.weight": second}
        else:
            name = name.replace("experts.down_proj", "experts.w2")
            name = name.replace("block_sparse_moe.router.", "block_sparse_moe.gate.")
            ours[name.replace("shared_mlp.output_linear", "shared_mlp.down_proj")] = value
    return ours


def backbone(theirs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Convert transformers' names in memory to those in Nemotron-H's files."""
    return {
        f"backbone.{n.removeprefix('model.')}" if n.startswith("model.") else n: value
        for n, value in theirs.items()
    }


@pytest.mark.parametrize("length", [1, 3, 19])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_equals_transformers(config: HybridConfig, length: int) -> None:
    """Lengths include some below the convolution's taps, and none is a multiple of a chunk."""
    names = backbone if isinstance(config, NemotronHConfig) else renamed
    compare(build(config), reference(config), names, length=length + 1, within=1e-4)


@pytest.mark.parametrize("kind", ["left", "right"])
@pytest.mark.parametrize("name", ["bamba", "granite", "nemotron"])
def test_padding_is_not_seen(name: str, kind: str) -> None:
    config = CONFIGS[name]
    names = backbone if isinstance(config, NemotronHConfig) else renamed
    compare(build(config), reference(config), names, kind=kind, within=1e-4)


@pytest.mark.parametrize("split", [(17,), (1,) * 17, (6, 1, 10)])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_advance_equals_forward(config: HybridConfig, split: tuple[int, ...]) -> None:
    advances_like_forward(filled(config), split)


@pytest.mark.parametrize("config", [BAMBA, like(GRANITE, balance_coefficient=0.7), NEMOTRON])
def test_recomputation_changes_nothing(config: HybridConfig) -> None:
    recomputation_changes_nothing(config)


@pytest.mark.parametrize("config", [BAMBA, like(GRANITE, balance_coefficient=0.7), NEMOTRON])
def test_wrapping_skips_no_block(config: HybridConfig) -> None:
    layers = "backbone.layers" if isinstance(config, NemotronHConfig) else "model.layers"
    wrapping_skips_no_block(config, layers)


def test_the_balance_of_granites_experts_is_that_of_all_layers() -> None:
    """It is added in training; transformers 5.17 reads the setting but does not compute it."""
    coefficient = 0.7
    model = filled(like(GRANITE, balance_coefficient=coefficient))
    tokens = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(1))
    seen: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda *call: seen.append(call[2][1]))
    trained = model(tokens, tokens.roll(-1, 1))
    assert len(seen) == 3 and all(load[0].sum() == 2 * 20 * 2 for load in seen)
    expected = coefficient * balance_loss(torch.stack(seen).sum(0), 2)
    seen.clear()
    for block in model.blocks:
        block._forward_hooks.clear()
    evaluated = model.eval()(tokens, tokens.roll(-1, 1))
    torch.testing.assert_close(trained - evaluated, expected, rtol=1e-4, atol=1e-5)


def test_the_state_has_what_each_kind_of_layer_asks_for() -> None:
    states = build(NEMOTRON).start(2, 50)
    assert [sorted(state) for state in states] == [
        *(["conv", "ssm"], [], ["count", "k", "v"], ["conv", "ssm"], []),
    ]


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("config", [BAMBA, GRANITE, NEMOTRON])
def test_dtype_of_the_stream_under_bfloat16_weights(config: HybridConfig, wide: bool) -> None:
    model = filled(like(config, residual_in_fp32=wide)).bfloat16()
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    logits = model(tokens)
    assert logits.dtype == torch.bfloat16
    assert set(seen) == {torch.float32 if wide else torch.bfloat16}
    exact = filled(config)(tokens)
    assert (logits.float() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(
    ("config", "changes", "shown"),
    [
        (BAMBA, {"pattern": "M-M"}, "pattern: '-' is not a kind of layer of bamba; it has M"),
        (NEMOTRON, {"pattern": "MEM*E"}, "'E' is not a kind of layer of nemotron_h"),
        (BAMBA, {"n_layer": 4}, "pattern: has 3 letters, but n_layer is 4; fix: give a letter"),
        (BAMBA, {"n_groups": 3}, "n_groups: 3 does not divide the 4 heads"),
        (BAMBA, {"n_kv_head": 3}, "n_kv_head: 3 does not divide n_head 4"),
        (BAMBA, {"n_head": 256}, "n_head: 256 does not divide d_model"),
        (GRANITE, {"n_head": 256}, "n_head: 256 does not divide d_model"),
        (BAMBA, {"head_dim": 6}, "an even part of a head, not 3"),
        (GRANITE, {"top_k": 0}, "n_expert: 5, top_k: 0 and d_expert: 24 go together"),
        (GRANITE, {"top_k": 6}, "top_k: 6 of only 5 experts"),
        (DENSE, {"balance_coefficient": 0.1}, "there are no experts to balance"),
        (DENSE, {"mlp_bias": True}, "mlp_bias: this MLP has none"),
        (DENSE, {"logits_scaling": 0.0}, "logits_scaling: must be more than 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    config: HybridConfig, changes: dict[str, Any], shown: str
) -> None:
    with pytest.raises(RequestError) as caught:
        like(config, **changes)
    assert shown in str(caught.value)


def test_all_that_does_not_fit_is_reported_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        like(BAMBA, pattern="M-", n_groups=3, n_kv_head=3)
    assert len(caught.value.faults) == 4


HYBRIDS = [
    *("bamba-9b", "granite-4.0-h-350m", "granite-4.0-h-1b", "granite-4.0-h-micro"),
    *("granite-4.0-h-tiny", "granite-4.0-h-small", "nemotron-h-4b", "nemotron-h-8b"),
    *("nemotron-h-47b", "nemotron-h-56b", "nemotron-nano-9b-v2", "nemotron-nano-12b-v2"),
]


@pytest.mark.parametrize("name", HYBRIDS)
def test_presets_have_as_many_parameters_as_transformers_models(name: str) -> None:
    """Made from the settings that a conversion writes."""
    sizes = preset(name)
    settings = json.loads(json.dumps(hf.write(sizes)))
    with torch.device("meta"):
        theirs: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(settings.pop("model_type"), **settings)
        )
    assert parameters(sizes) == sum(parameter.numel() for parameter in theirs.parameters())


def test_published_numbers_of_parameters_come_out() -> None:
    """From transformers' documentation for Bamba, from the names or hub pages for the others."""
    for name, billions in (
        *(("bamba-9b", 9.78), ("granite-4.0-h-small", 32.2), ("nemotron-nano-9b-v2", 8.89)),
        *(("nemotron-h-8b", 8), ("nemotron-h-47b", 47), ("nemotron-h-56b", 56)),
        *(("granite-4.0-h-tiny", 7), ("nemotron-nano-12b-v2", 12)),
    ):
        count = parameters(preset(name)) / 1e9
        within = 0.005 if isinstance(billions, float) else 0.5
        assert count == pytest.approx(billions, abs=max(within, 0.002 * billions)), name


def test_where_the_published_models_have_attention() -> None:
    found = {
        name: [n for n, kind in enumerate(preset(name).pattern) if kind == "*"]  # type: ignore[attr-defined]
        for name in HYBRIDS
    }
    assert found["bamba-9b"] == [9, 18, 27]
    assert found["granite-4.0-h-tiny"] == found["granite-4.0-h-small"] == [5, 15, 25, 35]
    assert found["granite-4.0-h-350m"] == [10, 13, 17, 27]
    assert found["nemotron-h-8b"] == [7, 18, 29, 40]
    assert len(found["nemotron-h-56b"]) == 10 and len(found["nemotron-nano-12b-v2"]) == 6
    assert preset("mamba_9.8b") is preset("bamba-9b")


def test_first_values() -> None:
    wide: dict[str, Any] = {"d_model": 256, "d_ff": 512, "n_mamba_head": 32, "d_conv": 4}
    for config, block in (
        (like(BAMBA, **wide), "model.layers.0.mamba."),
        (like(NEMOTRON, **wide), "backbone.layers.0.mixer."),
    ):
        model = build(config)

        def first(name: str, model: Any = model) -> Tensor:
            return model.initial(name, model.get_parameter(name).shape, 7)  # type: ignore[no-any-return]

        ends = 0.02 / math.sqrt(config.branches * config.n_layer)
        assert first(f"{block}in_proj.weight").std() == pytest.approx(0.02, rel=0.02)
        assert first(f"{block}out_proj.weight").std() == pytest.approx(ends, rel=0.02)
        assert 1 <= first(f"{block}A_log").exp().min() <= first(f"{block}A_log").exp().max() <= 16
        assert first(f"{block}conv1d.weight").abs().max() <= 0.5
        for ones in ("D", "norm.weight"):
            assert (first(f"{block}{ones}") == 1).all()
    granite = build(like(GRANITE, **wide, logits_scaling=4.0, initializer_range=0.1))
    for name, deviation in (
        ("model.layers.0.mamba.in_proj.weight", 0.1 / 2),
        ("model.layers.0.block_sparse_moe.experts.w1", 0.1 / 2),
        ("model.layers.0.shared_mlp.down_proj.weight", 0.1 / 2 / math.sqrt(6)),
        ("model.embed_tokens.weight", 0.1),
    ):
        made = granite.initial(name, granite.get_parameter(name).shape, 7)
        assert made.std() == pytest.approx(deviation, rel=0.02), name


@pytest.mark.slow
@pytest.mark.parametrize("config", [BAMBA, GRANITE, NEMOTRON])
def test_it_learns(config: HybridConfig) -> None:
    model = filled(config)
    tokens = torch.randint(61, (4, 33), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
