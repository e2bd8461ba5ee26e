"""Options of Hugging Face configurations: transformers' logits and gradients, and the way back.

Each is a small random model that is converted to ours and back. docs/training/models.md is checked
against this list.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from training.convert import hf, state_spaces
from training.convert.__main__ import convert
from training.convert.source import Source, load
from training.errors import RequestError
from training.models import ACTIVATIONS, LlamaConfig, RopeScaling
from training.ops.rope_scaling import USES

WHERE = Path("config.json")
TINY: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {**TINY, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA = {**TINY, "state_size": 4}
MAMBA2 = {**TINY, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8}
BAMBA: dict[str, Any] = {
    **{**HEADS, "attn_layer_indices": [1], "pad_token_id": None},
    **{"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8},
}
NEMOTRON: dict[str, Any] = {
    **{name: HEADS[name] for name in HEADS if name != "num_hidden_layers"},
    **{"layers_block_type": ["mamba", "attention", "mlp"], "head_dim": 8, "pad_token_id": None},
    **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2},
}
WITHIN = {"original_max_position_embeddings": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, **WITHIN}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [1.5, 2.0, 3.0, 7.0],
    **WITHIN,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **WITHIN}


def llama(**rope: Any) -> dict[str, Any]:
    return {
        **HEADS,
        "max_position_embeddings": 32,
        "rope_parameters": {"rope_theta": 100.0, **rope},
    }


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", llama(rope_type="linear", factor=3.0)),
    "llama3": ("llama", llama(rope_type="llama3", **LLAMA3)),
    "dynamic": (
        "llama",
        {**llama(rope_type="dynamic", factor=2.0), "max_position_embeddings": 8},
    ),
    "dynamic, mistral": (
        "mistral",
        {**llama(rope_type="dynamic", factor=4.0), "max_position_embeddings": 8},
    ),
    "yarn": ("llama", llama(**YARN)),
    "yarn, wide heads": ("llama", {**llama(**YARN), "head_dim": 64}),
    "yarn, its ramp": ("llama", llama(**YARN, beta_fast=3.0, beta_slow=0.5, truncate=False)),
    "yarn, attention_factor": ("mixtral", {**llama(**YARN, attention_factor=0.7), "head_dim": 8}),
    "yarn, mscale": ("llama", llama(**YARN, mscale=0.7, mscale_all_dim=1.3)),
    "yarn, one mscale": ("llama", llama(**YARN, mscale=0.7)),
    "longrope": ("llama", llama(**LONGROPE)),
    "longrope, factor": ("llama", llama(**LONGROPE, factor=16.0)),
    "longrope, attention_factor": ("mistral", llama(**LONGROPE, attention_factor=1.3)),
    "hidden_act gelu": ("llama", {**HEADS, "hidden_act": "gelu"}),
    "hidden_act gelu_new": ("llama", {**HEADS, "hidden_act": "gelu_new"}),
    "hidden_act gelu_pytorch_tanh": ("mistral", {**HEADS, "hidden_act": "gelu_pytorch_tanh"}),
    "time_step_rank": ("mamba", {**MAMBA, "time_step_rank": 5}),
    "time_step_limit": ("mamba2", {**MAMBA2, "time_step_limit": [0.02, 0.06]}),
    "time_step_limit, below": ("mamba2", {**MAMBA2, "time_step_limit": [0.04, math.inf]}),
    "time_step_limit, bamba": ("bamba", {**BAMBA, "time_step_limit": [0.02, 0.06]}),
    "time_step_min": ("nemotron_h", {**NEMOTRON, "time_step_min": 0.3}),
    # Transformers does not use it for Mamba-2.
    "time_step_rank, mamba2": ("mamba2", {**MAMBA2, "time_step_rank": 3}),
}


def saved(
    name: str, folder: Path, options: dict[str, tuple[str, dict[str, Any]]] = OPTIONS
) -> tuple[nn.Module, Path]:
    """Return a transformers model whose parameters are all random, and its folder."""
    family, settings = options[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **json.loads(json.dumps(settings)))
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model.eval(), folder


def measured(model: nn.Module, length: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits (b, l, v) of some tokens, and the gradients of their loss by name."""
    model.requires_grad_().zero_grad()
    ids = torch.randint(40, (2, length), generator=torch.Generator().manual_seed(5))  # (b, l)
    out = model(ids)
    logits = out if isinstance(out, Tensor) else out.logits  # (b, l, v)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    if type(model).__name__ == "NemotronHForCausalLM":  # its files have other names
        gradients = {re.sub(r"^model\.", "backbone.", n): one for n, one in gradients.items()}
    return logits.detach(), gradients


def ours(form: str, folder: Path) -> nn.Module:
    return load(Source.open(form, folder), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """The texts are as long as in the first training, or longer."""
    theirs, first = saved(name, tmp_path / "first")
    convert(["--from", "hf", str(first), "--to", "ours", str(tmp_path / "ours")])
    here = ours("ours", tmp_path / "ours")
    for length in (7, 8, 21):
        expected, gradients = measured(theirs, length)
        found, made = measured(here, length)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        for one, gradient in made.items():
            if one in gradients:
                torch.testing.assert_close(gradient, gradients[one], rtol=1e-6, atol=1e-6, msg=one)
        assert {n for n in made if "experts" not in n and ".gate." not in n} <= gradients.keys()


PLAIN: dict[str, Any] = {
    "rope_scaling": None,
    "hidden_act": "silu",
    "dt_limit_low": 0.0,
    "dt_limit_high": 0.0,
}


@pytest.mark.parametrize("name", [name for name in OPTIONS if "rank" not in name])
def test_each_option_changes_what_is_computed(name: str, tmp_path: Path) -> None:
    """Otherwise the comparison with transformers would prove nothing about it."""
    _, folder = saved(name, tmp_path / "first")
    source = Source.open("hf", folder)
    plain = {n: value for n, value in PLAIN.items() if hasattr(source.sizes, n)}
    with_option, _ = measured(load(source, torch.device("cpu"), torch.float32), 21)
    source.sizes = replace(source.sizes, **plain)
    without, _ = measured(load(source, torch.device("cpu"), torch.float32), 21)
    assert (with_option - without).abs().max() > 3e-5


@pytest.mark.parametrize("name", OPTIONS)
def test_the_way_back_keeps_the_option(name: str, tmp_path: Path) -> None:
    """Transformers itself reads what is written: entries, sizes and logits are kept."""
    theirs, first = saved(name, tmp_path / "first")
    convert(["--from", "hf", str(first), "--to", "ours", str(tmp_path / "ours")])
    convert(["--from", "ours", str(tmp_path / "ours"), "--to", "hf", str(tmp_path / "back")])
    before, after = (AutoConfig.from_pretrained(tmp_path / one) for one in ("first", "back"))
    family, settings = OPTIONS[name]
    for entry in settings.keys() - {"time_step_rank"} if family == "mamba2" else settings:
        was, now = getattr(before, entry), getattr(after, entry)
        if entry == "rope_parameters":
            now = {key: value for key, value in now.items() if key in was}
        assert now == was, entry
    assert Source.open("hf", tmp_path / "back").sizes == Source.open("hf", first).sizes
    read: Any = AutoModelForCausalLM.from_pretrained
    back = read(tmp_path / "back", attn_implementation="eager").eval()
    assert torch.equal(measured(back, 21)[0], measured(theirs, 21)[0])


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama", llama(rope_type="yarn", factor="4"), "rope_scaling: factor must be a number"),
        (
            "llama",
            llama(**YARN, beta_fast=1.0, beta_slow=2.0),
            "beta_slow must be more than 0",
        ),
        (
            "llama",
            llama(**{**YARN, "original_max_position_embeddings": 0.5}),
            "a whole number, not",
        ),
        ("llama", llama(**YARN, attention_factor=0.0), "attention_factor must be more than 0"),
        ("llama", llama(**YARN, truncate="yes"), "truncate must be true or false, not 'yes'"),
        ("llama", llama(rope_type="longrope", **WITHIN), "short_factor has 0 numbers, but a head"),
        (
            "llama",
            llama(**{**LONGROPE, "long_factor": [1.0] * 5}),
            "long_factor has 5 numbers, but a head of 8 channels has 4 pairs; fix: give one for "
            "each",
        ),
        (
            "llama",
            llama(**{**LONGROPE, "short_factor": [1, 1, 1, -1]}),
            "short_factor and long_factor must be more than 0",
        ),
        (
            "llama",
            llama(**{**LONGROPE, "short_factor": [1, 1, 1, "1"]}),
            "short_factor must be a list of numbers, not [1, 1, 1, '1']",
        ),
        ("llama", {**HEADS, "hidden_act": "relu"}, "made with silu or gelu or gelu_new or"),
        (
            "mixtral",
            {**HEADS, "hidden_act": "gelu"},
            "mixtral is made with silu",
        ),
        (
            "mamba2",
            {**MAMBA2, "time_step_limit": [0.0, 0.0]},
            "time_step_limit must be two numbers",
        ),
        ("mamba", {**MAMBA, "time_step_rank": "wide"}, "or auto, not 'wide'"),
        ("bamba", {**BAMBA, "attn_layer_indices": "1"}, "attn_layer_indices must be a list of"),
        ("bamba", {**BAMBA, "mamba_d_head": 8}, "times mamba_d_head 8 must be mamba_expand x"),
        (
            "bamba",
            {**BAMBA, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope type 'yarn': bamba is made with default",
        ),
        (
            "bamba",
            {**BAMBA, "rope_parameters": {"partial_rotary_factor": 1.0}},
            "partial_rotary_factor 1.0: bamba rotates half of a head",
        ),
        (
            "granitemoehybrid",
            {**BAMBA, "position_embedding_type": "alibi"},
            "position_embedding_type 'alibi': must be rope, nope or null",
        ),
        ("granitemoehybrid", {**BAMBA, "layer_types": ["conv"]}, "layer_types must be a list of"),
        (
            "nemotron_h",
            {**NEMOTRON, "layers_block_type": ["mamba", "moe"]},
            "'E' is not a kind of layer of nemotron_h",
        ),
        ("nemotron_h", {**NEMOTRON, "mlp_hidden_act": "silu"}, "nemotron_h is made with relu2"),
        ("nemotron_h", {**NEMOTRON, "num_nextn_predict_layers": 1}, "predict further tokens"),
    ],
)
def test_values_that_make_no_sense(family: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        hf.read({"model_type": family, **settings}, WHERE)
    assert any(one.startswith("config.json: ") and message in one for one in error.value.faults)


def test_a_context_of_the_first_training_beside_the_table_counts_more(tmp_path: Path) -> None:
    """As in transformers' model of such a file."""
    option = "beside"
    beside = {**llama(**YARN), "original_max_position_embeddings": 16}
    theirs, folder = saved(option, tmp_path / "first", {option: ("llama", beside)})
    sizes = Source.open("hf", folder).sizes
    assert isinstance(sizes, LlamaConfig) and sizes.rope_scaling is not None
    assert sizes.rope_scaling.original_context == 16
    expected, _ = measured(theirs, 21)
    torch.testing.assert_close(measured(ours("hf", folder), 21)[0], expected, rtol=0, atol=1e-6)


def test_every_kind_of_scaling_is_among_the_options() -> None:
    made = {scaling["rope_type"] for _, one in OPTIONS.values() if (scaling := rope_of(one))}
    assert made == set(USES)


def rope_of(settings: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = settings.get("rope_parameters", {})
    return found


def test_fields_that_a_kind_has_no_use_for() -> None:
    with pytest.raises(RequestError, match="linear has no beta_fast; fix: leave it out"):
        RopeScaling(kind="linear", factor=2, beta_fast=3.0)
    with pytest.raises(RequestError, match="rope_scaling: faktor is not one of kind, factor,"):
        RopeScaling.of({"kind": "linear", "factor": 2, "faktor": 3})


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"dt_rank": 5}, {"dt_rank": 5}),
        ({"dt_rank": 1}, {}),  # the default, derived from the width
        ({"layer": "Mamba2", "headdim": 8, "dt_limit": [0.0, 0.5]}, {"dt_limit_high": 0.5}),
        ({"layer": "Mamba2", "headdim": 8, "dt_limit": [0.0, math.inf]}, {}),
    ],
)
def test_those_of_state_spaces(given: dict[str, Any], sizes: dict[str, Any]) -> None:
    settings = {"d_model": 16, "n_layer": 1, "vocab_size": 12, "ssm_cfg": given}
    found = state_spaces.read(settings, WHERE)
    wanted = {"dt_rank": 0, "dt_limit_high": 0.0, **sizes}
    assert all(getattr(found, name, value) == value for name, value in wanted.items())
    assert state_spaces.read(state_spaces.write(found), WHERE) == found


EVERY: dict[str, dict[str, Any]] = {
    "mamba": TINY,
    "mamba2": {**MAMBA2, "n_groups": 2},
    **dict.fromkeys(("llama", "mistral", "gpt_neox"), HEADS),
    "mixtral": {**HEADS, "output_router_logits": True},
    "bamba": BAMBA,
    "granitemoehybrid": {
        **{name: BAMBA[name] for name in BAMBA if name != "attn_layer_indices"},
        **{"layer_types": ["mamba", "attention"], "output_router_logits": True},
        **{"attention_multiplier": 0.3, "position_embedding_type": "rope"},
    },
    "nemotron_h": NEMOTRON,
}
PAGE = Path(__file__).parents[3] / "docs" / "training" / "models.md"


def another(value: Any) -> Any:
    """Return another value of the same type, which a configuration may have or which is refused."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 or 0.5
    if isinstance(value, str):
        return "relu"
    if isinstance(value, dict):
        return {"rope_type": "linear", "factor": 2.0}
    return [0.1, 0.2] if isinstance(value, list) else 3


@pytest.mark.parametrize("family", EVERY)
def test_the_page_lists_the_options_that_count(family: str) -> None:
    """Of all options in transformers, those that change our sizes or that are refused."""
    full = json.loads(
        AutoConfig.for_model(family, **EVERY[family]).to_json_string(use_diff=False)
    ) | {"model_type": family}
    sizes = hf.read(full, WHERE)
    counts = set()
    for option in full.keys() - {"model_type"}:
        try:
            differs = hf.read({**full, option: another(full[option])}, WHERE) != sizes
        except RequestError:
            differs = True
        if differs:
            counts.add(option)
    table = PAGE.read_text().partition("## Options of a config.json")[2].partition("\n## ")[0]
    rows = {row[0]: row[1] for row in re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.MULTILINE)}
    shown = {
        word
        for families, options in rows.items()
        if families == "all" or f"`{family}`" in families
        for word in re.findall(r"`(\w+)`", options)
    }
    assert shown == counts


def test_the_page_lists_what_options_may_be() -> None:
    page = PAGE.read_text()
    for kind in USES:
        assert f"`{kind}`" in page
    for activation in ACTIVATIONS:
        assert f"`{activation}`" in page
