"""Sizes of a model as stored in checkpoints, of this release and of earlier ones."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.training.support.runs import run, write_text
from training.config.yaml import load
from training.convert import native
from training.errors import RequestError
from training.models import FAMILIES, LlamaConfig, MambaConfig, NeoXConfig, RopeScaling, preset
from training.models.families import completed, identity

HEADS: dict[str, Any] = {
    "d_model": 32,
    "n_layer": 1,
    "vocab_size": 256,
    "n_head": 4,
    "n_kv_head": 2,
    "d_ff": 48,
}


def test_what_a_checkpoint_of_an_earlier_release_does_not_have_is_the_default() -> None:
    mamba = identity(MambaConfig(d_model=32, n_layer=1))
    assert completed({n: v for n, v in mamba.items() if n != "dt_rank"}) == mamba
    assert completed({**mamba, "dt_rank": 7}) != mamba
    linear = LlamaConfig(**HEADS, rope_scaling=RopeScaling(kind="linear", factor=2.0))
    before = {**identity(linear), "rope_scaling": {"kind": "linear", "factor": 2.0}}
    before["rope_scaling"] |= {"low_freq_factor": 1.0, "original_context": 8192}
    del before["hidden_act"]
    assert completed(before) == identity(linear)
    assert completed({"family": "llama", "d_model": 32}).get("n_head") is None


NEOX: dict[str, Any] = {"d_model": 32, "n_layer": 1, "n_head": 2, "d_ff": 48}
NUMBERS = [
    pytest.param(sizes, one.name, id=f"{family}-{one.name}")
    for family in FAMILIES
    for sizes in [
        NeoXConfig(**NEOX)
        if family == "gpt_neox"
        else preset("mathstral-7b" if family == "mistral" else f"{family}-tiny")
    ]
    for one in fields(sizes)
    if one.type == "float"
]


@pytest.mark.parametrize(("sizes", "name"), NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_number_that_no_model_can_be_made_with_is_refused(
    sizes: Any, name: str, value: float
) -> None:
    if (name, value) == ("dt_limit_high", float("inf")):
        return  # no limit
    with pytest.raises(RequestError, match=rf"^{name}|^dt_limit_low: .* dt_limit_high (-1|nan)"):
        replace(sizes, **{name: value})


@pytest.mark.parametrize(
    ("model", "given", "shown"),
    [
        ("mamba-tiny", {"dt_min": 0}, "dt_min: must be more than 0 and finite, not 0.0"),
        ("mamba-tiny", {"dt_min": 0.2}, "dt_min: 0.2 must not be above dt_max 0.1"),
        ("mamba2-tiny", {"dt_max": 1e-4}, "dt_min: 0.001 must not be above dt_max 0.0001"),
        ("mamba-tiny", {"dt_init_floor": -1}, "dt_init_floor: must be at least 0 and finite"),
        ("llama-tiny", {"rope_theta": 0}, "rope_theta: must be more than 0 and finite, not 0.0"),
        ("llama-tiny", {"norm_eps": 0}, "norm_eps: must be more than 0 and finite, not 0.0"),
        ("llama-tiny", {"initializer_range": 0}, "initializer_range: must be more than 0"),
        (
            "gpt_neox",
            {"hidden_dropout": 1},
            "hidden_dropout: must be at least 0 and less than 1, not 1",
        ),
        ("gpt_neox", {"attention_dropout": -0.1}, "attention_dropout: must be at least 0 and less"),
        ("granitemoehybrid-tiny", {"logits_scaling": 0}, "logits_scaling: must be more than 0"),
        ("granitemoehybrid-tiny", {"residual_multiplier": 0}, "residual_multiplier: must be more"),
    ],
)
def test_the_numbers_of_a_file(
    tmp_path: Path, model: str, given: dict[str, float], shown: str
) -> None:
    file = tmp_path / "run.yaml"
    start = {"family": model, **NEOX} if model == "gpt_neox" else {"name": model}
    section = json.dumps({**start, **given})
    file.write_text(
        f"model: {section}\ndata: {{dataset_path: 'text:x'}}\nrun: {{save_ckpt_path: x}}\n"
    )
    with pytest.raises(RequestError) as error:
        load(file, ())
    assert str(error.value).startswith(shown)


def test_the_least_and_the_greatest_numbers_make_a_model() -> None:
    NeoXConfig(**NEOX, hidden_dropout=0, attention_dropout=0.999)
    replace(preset("mamba-tiny"), dt_min=0.1, dt_max=0.1, dt_init_floor=0)  # type: ignore[call-arg]
    replace(preset("granitemoehybrid-tiny"), attention_multiplier=0, balance_coefficient=0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("factor", float("inf")),
        ("beta_fast", float("inf")),
        ("mscale", float("nan")),
        ("attention_factor", float("inf")),
    ],
)
def test_angles_are_stretched_by_finite_numbers(name: str, value: float) -> None:
    given: dict[str, Any] = {"kind": "yarn", "factor": 4.0, name: value}
    with pytest.raises(RequestError, match=f"rope_scaling: {name} must be finite, not {value}"):
        RopeScaling(**given)


LONGROPE = """
model:
  family: llama
  d_model: 32
  n_layer: 1
  n_head: 4
  n_kv_head: 2
  d_ff: 48
  vocab_size: 256
  rope_scaling:
    kind: longrope
    factor: 4
    original_context: 8
    short_factor: [1, 1.5, 2, 2]
    long_factor: [1, 2, 4, 8]
data: {dataset_path: "DATA", seq_length: 16, batch_size: 2}
run: {save_ckpt_path: "SAVE", num_steps: 2, hang_seconds: 0}
"""


@pytest.mark.processes
def test_a_run_with_lists_among_its_sizes_goes_on(tmp_path: Path) -> None:
    """So does one whose checkpoint was written before a size was introduced."""
    text = LONGROPE.replace("DATA", write_text(tmp_path / "text"))
    file, save = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text(text.replace("SAVE", str(save)))
    words = ("--config", str(file))
    assert (first := run(0, *words, program=("-m", "training"))).returncode == 0, first.stderr
    manifest = save / "checkpoints" / "step_2_ckp" / "manifest.json"
    held = json.loads(manifest.read_text())
    assert held["model"].pop("hidden_act") == "silu"
    manifest.write_text(json.dumps(held))
    done = run(0, *words, "num_steps=3", program=("-m", "training"))
    assert done.returncode == 0, done.stderr
    assert "at step 2" in done.stdout
    refused = run(*(0, *words, "num_steps=4", "model.hidden_act=gelu"), program=("-m", "training"))
    assert refused.returncode == 2
    assert "hidden_act: 'silu' in the checkpoint, 'gelu' asked for" in refused.stderr


@pytest.mark.processes
def test_a_run_whose_checkpoint_was_meant_for_shorter_texts_goes_on(tmp_path: Path) -> None:
    """It uses the current length, for which the model is intended from then on."""
    text = LONGROPE.replace("DATA", write_text(tmp_path / "text"))
    file, save = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text(
        text.replace("SAVE", str(save)).replace("  n_layer", "  context: 12\n  n_layer")
    )
    words = ("--config", str(file))
    for steps, length in ((1, 12), (2, 16)):
        changes = (f"num_steps={steps}", f"seq_length={length}")
        done = run(0, *words, *changes, program=("-m", "training"))
        assert done.returncode == 0, done.stderr
        assert steps == 1 or f"at step {steps - 1}" in done.stdout
        sizes, _ = native.read_checkpoint(save / "checkpoints" / f"step_{steps}_ckp")
        assert (sizes.context, sizes.rope_scaling.original_context) == (length, 8)  # type: ignore[attr-defined]
