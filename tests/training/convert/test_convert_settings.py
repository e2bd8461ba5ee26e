"""Settings of other formats: which are read, and which are refused by name."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.support.converted import reference, run, saved
from training import models
from training.convert import hf, native, state_spaces
from training.errors import RequestError
from training.ops.rope_scaling import USES

WHERE = Path("config.json")

HF_MAMBA: dict[str, Any] = {
    "model_type": "mamba",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "vocab_size": 12,
}
HF_MAMBA2 = {**HF_MAMBA, "model_type": "mamba2", "num_heads": 4, "head_dim": 8, "n_groups": 1}
HF_LLAMA = {
    **HF_MAMBA,
    "model_type": "llama",
    "num_attention_heads": 2,
    "intermediate_size": 8,
}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**HF_MAMBA, "model_type": "rwkv"}, "model_type 'rwkv' is not supported (known: "),
        ({**HF_MAMBA, "hidden_act": "relu"}, "hidden_act 'relu': mamba is made with silu"),
        ({**HF_MAMBA, "time_step_rank": 0}, "time_step_rank must be a whole number of at least 1"),
        ({**HF_MAMBA, "hidden_size": "16"}, "hidden_size must be a whole number, not '16'"),
        ({**HF_MAMBA, "hidden_size": 0}, "d_model: must be at least 1, not 0"),
        (
            {**HF_MAMBA, "quantization_config": {"bits": 4}},
            "quantization_config: quantised weights are not read",
        ),
        (
            {**HF_MAMBA2, "time_step_limit": [0.2, 0.1]},
            "time_step_limit must be two numbers of at least 0",
        ),
        ({**HF_MAMBA2, "num_heads": 5}, "num_heads 5: times head_dim 8 must be"),
        (
            {**HF_LLAMA, "rope_parameters": {"rope_type": "proportional"}},
            "rope type 'proportional': not supported (known: default, linear, dynamic, llama3,",
        ),
        ({**HF_LLAMA, "rope_scaling": {"type": "dynamic", "factor": 0.5}}, "factor must be at"),
        ({**HF_LLAMA, "rope_scaling": {"type": "linear"}}, "rope_scaling: factor must be given"),
        (
            {**HF_LLAMA, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters: must be one table for all layers",
        ),
        (
            {**HF_LLAMA, "partial_rotary_factor": 0.5},
            "partial_rotary_factor 0.5: llama rotates all",
        ),
        (
            {**HF_LLAMA, "model_type": "mistral", "layer_types": ["full_attention"]},
            "layer_types: all layers of ours are of one type",
        ),
        ({**HF_LLAMA, "model_type": "gpt_neox", "hidden_act": "gelu_fast"}, "made with gelu"),
        ({**HF_MAMBA, "model_type": ["mamba"]}, "model_type ['mamba'] is not supported (known: "),
        ({**HF_LLAMA, "head_dim": [1] * 10}, "head_dim must be a whole number, not [1, 1, 1"),
        ({**HF_LLAMA, "rope_scaling": {"type": ["linear"]}}, "rope type ['linear']: not supported"),
        (
            {**HF_LLAMA, "rope_scaling": {"type": "dynamic", "factor": math.inf}},
            "rope_scaling: factor must be finite, not inf",
        ),
        (
            {**HF_MAMBA2, "time_step_limit": [0, {"__float__": "x"}]},
            "time_step_limit must be two numbers of at least 0",
        ),
    ],
)
def test_settings_of_hugging_face_that_we_do_not_have(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError) as error:
        hf.read(settings, WHERE)
    assert str(error.value).startswith(f"config.json: {message}") or message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_whole_number_for_a_fraction() -> None:
    dropouts = {"hidden_dropout": 0, "attention_dropout": 0}
    found = hf.read(
        {**HF_LLAMA, "model_type": "gpt_neox", "num_attention_heads": 1, **dropouts}, WHERE
    )
    assert isinstance(found, models.NeoXConfig) and found.hidden_dropout == 0


HYBRID: dict[str, Any] = {
    **{"vocab_size": 40, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 48},
    "num_attention_heads": 8,
}


def test_settings_that_are_left_out_are_those_of_transformers() -> None:
    from transformers import AutoConfig

    for settings in (
        HF_MAMBA,
        HF_MAMBA2,
        HF_LLAMA,
        *(
            {**HF_LLAMA, "model_type": family, "num_attention_heads": 8}
            for family in ("mistral", "mixtral", "gpt_neox")
        ),
        *({**HYBRID, "model_type": family} for family in ("bamba", "granitemoehybrid")),
        {**HYBRID, "model_type": "nemotron_h", "layers_block_type": ["mlp", "mamba", "attention"]},
    ):
        values = {k: v for k, v in settings.items() if k != "model_type"}
        full = AutoConfig.for_model(settings["model_type"], **values).to_dict()
        assert hf.read(settings, WHERE) == hf.read(json.loads(json.dumps(full)), WHERE)


SS_MAMBA: dict[str, Any] = {"d_model": 16, "n_layer": 1, "vocab_size": 12}
SS_HYBRID: dict[str, Any] = {
    **{**SS_MAMBA, "d_intermediate": 64, "attn_layer_idx": [0]},
    **{"ssm_cfg": {"layer": "Mamba2", "headdim": 8}},
    "attn_cfg": {"num_heads": 2, "causal": True, "rotary_emb_dim": 4},
}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**SS_MAMBA, "ssm_cfg": {"layer": "Mamba3"}}, "ssm_cfg.layer 'Mamba3' is not supported"),
        ({**SS_MAMBA, "rms_norm": False}, "rms_norm False: ours has True only"),
        ({**SS_MAMBA, "d_intermediate": 64}, "d_intermediate 64: ours has 0 only"),
        ({**SS_MAMBA, "attn_layer_idx": [3]}, "attn_layer_idx [3]: ours has [] only"),
        ({**SS_MAMBA, "ssm_cfg": {"dt_rank": "5"}}, "ssm_cfg.dt_rank must be a whole number"),
        ({**SS_MAMBA, "ssm_cfg": {"d_state": 1.5}}, "ssm_cfg.d_state must be a whole number"),
        (
            {**SS_MAMBA, "ssm_cfg": {"layer": "Mamba2", "norm_before_gate": True}},
            "ssm_cfg.norm_before_gate True: ours has False only",
        ),
        (
            {**SS_MAMBA, "ssm_cfg": {"layer": "Mamba2", "dt_limit": [0.5]}},
            "ssm_cfg.dt_limit must be two numbers of at least 0, the smaller first, not [0.5]",
        ),
        ({"d_model": 16, "vocab_size": 12}, "n_layer is missing"),
        (
            {**SS_HYBRID, "attn_cfg": {"num_heads": 2, "causal": True, "rotary_emb_dim": 8}},
            "attn_cfg.rotary_emb_dim: ours is always half of head_dim, 4",
        ),
        ({**SS_HYBRID, "attn_cfg": {"num_heads": 2}}, "attn_cfg.causal False: ours has True only"),
        ({**SS_HYBRID, "attn_cfg": {}}, "attn_cfg.num_heads must be a whole number of at least 1"),
        ({**SS_HYBRID, "ssm_cfg": {}}, "with attention ours has Mamba2 only"),
        ({**SS_MAMBA, "ssm_cfg": [1] * 10}, "ssm_cfg must be a table, not [1, 1, 1"),
        ({**SS_MAMBA, "ssm_cfg": {"layer": {}}}, "ssm_cfg.layer {} is not supported"),
    ],
)
def test_settings_of_state_spaces_that_we_do_not_have(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError) as error:
        state_spaces.read(settings, WHERE)
    assert str(error.value) == f"config.json: {message}" or message in str(error.value)


ODD: tuple[Any, ...] = (None, True, "16", [1] * 10, {"a": 1}, [[1]], -1, 1.5, math.inf)


def settings_of_all_formats() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    yield from ((hf.read, settings) for settings in (HF_MAMBA, HF_MAMBA2))
    for family in ("llama", "mistral", "mixtral", "gpt_neox"):
        yield hf.read, {**HF_LLAMA, "model_type": family}
    for kind in USES:
        table = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 16}
        yield hf.read, {**HF_LLAMA, "rope_scaling": table}
    for family in ("bamba", "granitemoehybrid"):
        yield hf.read, {**HYBRID, "model_type": family, "layer_types": ["mamba"] * 3}
    for name, kinds in (("layers_block_type", ["mlp"]), ("hybrid_override_pattern", "M*")):
        yield hf.read, {**HYBRID, "model_type": "nemotron_h", name: kinds}
    heads = {"head_dim": 8, "num_heads_kv": 1, "qkv_proj_bias": True, "out_proj_bias": True}
    hybrid = {**SS_HYBRID, "attn_cfg": {**SS_HYBRID["attn_cfg"], **heads}}
    yield from ((state_spaces.read, settings) for settings in (SS_MAMBA, hybrid))
    sizes = models.LlamaConfig(d_model=16, n_layer=1, n_head=2, n_kv_head=1, d_ff=8)
    yield native.read_sizes, native.write_sizes(sizes)


def test_values_of_other_types_are_refused_by_name_or_taken() -> None:
    """Any value in any place, such as a list for a table, or a table for a number."""
    for read, settings in settings_of_all_formats():
        absent = {*hf.NAMES.get(settings.get("model_type", ""), {}).values(), "ssm_cfg"}
        tables = {name: value for name, value in settings.items() if isinstance(value, dict)}
        for value in ODD:
            changed = [{**settings, name: value} for name in absent | settings.keys()]
            changed += [
                {**settings, table: {**held, name: value}}
                for table, held in tables.items()
                for name in held
            ]
            for one in changed:
                with contextlib.suppress(RequestError):
                    read(one, WHERE)


def test_all_faults_of_a_config_are_reported_at_once() -> None:
    with pytest.raises(RequestError) as error:
        hf.read({**HF_MAMBA, "hidden_act": "relu", "time_step_rank": 0, "expand": True}, WHERE)
    shown = str(error.value).splitlines()
    assert shown[0] == "3 faults" and all("  - config.json: " in line for line in shown[1:])


MAMBA2: dict[str, Any] = {"d_model": 64, "n_layer": 1, "vocab_size": 12, "head_dim": 16}


def test_groups_that_are_normalised_another_way_are_not_converted() -> None:
    alone = models.Mamba2Config(**MAMBA2, n_groups=2)
    together = models.Mamba2Config(**MAMBA2, n_groups=2, norm_across_groups=True)
    with pytest.raises(RequestError, match="n_groups: transformers normalises all channels"):
        hf.write(alone)
    with pytest.raises(RequestError, match="n_groups: mamba-ssm normalises each group"):
        state_spaces.write(together)
    assert hf.read(hf.write(together), WHERE) == together
    assert state_spaces.read(state_spaces.write(alone), WHERE) == alone
    for across in (False, True):  # with one group, both are the same
        one = models.Mamba2Config(**MAMBA2, norm_across_groups=across)
        assert hf.write(one)["n_groups"] == state_spaces.write(one)["ssm_cfg"]["ngroups"] == 1


def test_models_that_a_format_does_not_have() -> None:
    heads: dict[str, Any] = {"d_model": 16, "n_layer": 1, "n_head": 2, "n_kv_head": 1, "d_ff": 8}
    with pytest.raises(RequestError, match="has Mamba, Mamba-2 and Bamba models only, not llama"):
        state_spaces.write(models.LlamaConfig(**heads))
    with pytest.raises(RequestError, match=r"norm_eps 1e-06: mamba-ssm's norms always have 1e-05"):
        state_spaces.write(models.MambaConfig(d_model=16, n_layer=1, norm_eps=1e-6))
    with pytest.raises(RequestError, match="attention_bias: transformers' mistral has none"):
        hf.write(models.MistralConfig(**heads, attention_bias=True))


def test_heads_that_transformers_refuses_are_refused_before_it() -> None:
    """Only its Llama requires that they divide the width, even if the head size is given."""
    from transformers import AutoConfig

    sizes: dict[str, Any] = {"d_model": 16, "n_layer": 1, "n_head": 3, "n_kv_head": 1, "d_ff": 8}
    with pytest.raises(RequestError, match=r"n_head: .* llama .* 3 do not divide d_model 16"):
        hf.write(models.LlamaConfig(**sizes, head_dim=4))
    for one in (models.MistralConfig, models.MixtralConfig):
        there = AutoConfig.for_model(**hf.write(one(**sizes, head_dim=4)))
        assert (there.num_attention_heads, there.head_dim) == (3, 4)


@pytest.mark.parametrize("end", ["hf", "neuron", "ours", "state-spaces"])
def test_token_ids_of_a_config_go_along(end: str, tmp_path: Path) -> None:
    """They are in config.json, or if it has none, in a generation_config.json."""
    first = saved(reference("mamba2" if end == "neuron" else "mamba"), tmp_path / "first")
    (first / "generation_config.json").unlink()
    ids = {"bos_token_id": 1, "eos_token_id": [7, 0]}
    settings = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps({**settings, "pad_token_id": None, **ids}))

    def stated(folder: Path) -> dict[str, Any]:
        path = folder / "generation_config.json"
        held = json.loads((path if path.is_file() else folder / "config.json").read_text())
        return {name: held.get(f"{name}_token_id") for name in ("bos", "eos", "pad")}

    run("--from", "hf", first, "--to", end, tmp_path / "there")
    assert stated(tmp_path / "there") == {"bos": 1, "eos": [7, 0], "pad": None}
    assert (tmp_path / "there" / "generation_config.json").exists() == (end[0] in "os")
    run("--from", end, tmp_path / "there", "--to", "hf", tmp_path / "back")
    assert stated(tmp_path / "back") == {"bos": 1, "eos": [7, 0], "pad": None}


def test_a_file_of_token_ids_goes_along_as_it_is(tmp_path: Path) -> None:
    first = saved(reference("mamba"), tmp_path / "first")
    (first / "generation_config.json").write_text('{"eos_token_id": 5}')
    run("--from", "hf", first, "--to", "ours", tmp_path / "ours")
    assert (tmp_path / "ours" / "generation_config.json").read_text() == '{"eos_token_id": 5}'
