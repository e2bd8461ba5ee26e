"""The converter of the Neuron system, from the outside, and its layout of a model's tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.training.support.ranks import CORE, SIZES, split, weights
from tests.training.support.runs import run
from training.convert import formats
from training.convert.__main__ import convert as convert_weights
from training.convert.folders import detect
from training.convert.source import Source, load
from training.convert_mamba2_ssm_checkpoint import convert
from training.errors import RequestError
from training.models import LlamaConfig, Mamba2Config

PROGRAM = ("-m", "training.convert_mamba2_ssm_checkpoint")
WHERE = Path("config.json")
PUBLISHED = Mamba2Config(d_model=64, n_layer=2, vocab_size=48)
"""Sizes from a published model's own defaults: heads of 64, states of 128."""
SSM_CONFIG: dict[str, Any] = {
    "d_model": 64,
    "n_layer": 2,
    "vocab_size": 37,
    "ssm_cfg": {"layer": "Mamba2"},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 16,
    "tie_embeddings": True,
}
CODESTRAL = replace(SIZES, tie_embeddings=False, n_groups=2)
PARAMS: dict[str, Any] = {
    "dim": 32,
    "n_layers": 2,
    "vocab_size": 48,
    "n_groups": 2,
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 1,
    "tie_embeddings": False,
    "model_type": "mamba",
}


def ssm(folder: Path, settings: dict[str, Any] = SSM_CONFIG) -> dict[str, Tensor]:
    """Write a folder as state-spaces publishes them; returns its weights under our names."""
    held = weights(PUBLISHED)
    theirs = {name.replace("embeddings", "embedding"): one for name, one in held.items()}
    theirs["lm_head.weight"] = theirs["backbone.embedding.weight"]
    folder.mkdir()
    torch.save(theirs, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(settings))
    return held


def codestral(folder: Path, settings: dict[str, Any] = PARAMS) -> dict[str, Tensor]:
    """Write a folder as Mistral publishes them; returns its weights under our names."""
    held = weights(CODESTRAL)
    theirs = {f"model.{n.replace('embeddings', 'embedding')}": one for n, one in held.items()}
    folder.mkdir()
    save_file(theirs, folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps(settings))
    return held


def call(kind: str, folder: Path, target: Path, *words: str, precision: str = "fp32") -> Path:
    convert(["-m", kind, "-p", precision, "-i", str(folder), "-o", str(target), *words])
    return target


def refused(*words: object) -> str:
    with pytest.raises(RequestError) as error:
        convert([str(word) for word in words])
    return str(error.value)


def logits(folder: Path) -> Tensor:
    source = Source.open(detect(folder), folder)
    with torch.no_grad():
        return load(source, torch.device("cpu"), torch.float32)(ids())  # (b, l, v)


def ids() -> Tensor:
    return torch.randint(37, (2, 19), generator=torch.Generator().manual_seed(1))  # (b, l)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value.to(found[name].dtype)), name


@pytest.mark.processes
def test_the_documented_command_under_torchrun(tmp_path: Path) -> None:
    held = ssm(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    words = ("-m", "mamba_ssm", "-p", "fp16", "-i", str(tmp_path / "in"), "-o", str(out))
    done = run(1, *words, "--split_proj", program=PROGRAM)
    assert done.returncode == 0, done.stderr
    assert "24 tensors" in done.stdout and "from_pretrained" in done.stdout
    names = sorted(path.name for path in out.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    found = load_file(out / "model.safetensors")
    assert {one.dtype for one in found.values()} == {torch.float16}
    assert_equal(found, split(held, PUBLISHED))
    with safe_open(str(out / "model.safetensors"), framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    settings = json.loads((out / "config.json").read_text())
    wanted = {
        **{"model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 48},
        **{"num_heads": 2, "head_dim": 64, "state_size": 128, "n_groups": 1, "expand": 2},
        **{"rms_norm": True, "rmsnorm_within_groups": True, "tie_word_embeddings": True},
        **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "torch_dtype": "float16"},
    }
    assert {name: settings[name] for name in wanted} == wanted


def test_only_one_of_many_ranks_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    ssm(tmp_path / "in")
    assert not call("mamba_ssm", tmp_path / "in", tmp_path / "out").exists()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_split_proj_transformers_reads_it(precision: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ssm(tmp_path / "in")
    out = call("mamba_ssm", tmp_path / "in", tmp_path / "out", precision=precision)
    read: Any = AutoModelForCausalLM.from_pretrained
    model, shown = read(out, dtype=torch.float32, output_loading_info=True)
    assert not any(shown.values()), shown
    with torch.no_grad():
        wanted = model(ids()).logits  # (b, l, v)
    torch.testing.assert_close(logits(out), wanted, rtol=0, atol=1e-4)
    cut = call("mamba_ssm", tmp_path / "in", tmp_path / "cut", "-s", precision=precision)
    assert torch.equal(logits(cut), logits(out))
    if precision == "fp32":
        torch.testing.assert_close(logits(tmp_path / "in"), wanted, rtol=0, atol=1e-4)


def test_codestral(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = codestral(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.model.v3").write_bytes(b"pieces")
    out = call("codestral", tmp_path / "in", tmp_path / "out")
    assert (
        "own code takes the mean of the gated norm over all groups together"
        in capsys.readouterr().out
    )
    cut = call("codestral", tmp_path / "in", tmp_path / "cut", "--split_proj")
    assert "transformers" not in capsys.readouterr().out
    assert_equal(load_file(out / "model.safetensors"), held)
    assert_equal(load_file(cut / "model.safetensors"), split(held, CODESTRAL))
    for folder in (out, cut):
        settings = json.loads((folder / "config.json").read_text())
        ids = [settings[f"{name}_token_id"] for name in ("bos", "pad", "eos")]
        assert ids == [0, 1, 2] and settings["rmsnorm_within_groups"] is True
        assert (folder / "tokenizer.model").read_bytes() == b"pieces"
        # It does not name the chunk size, which is 256 everywhere.
        assert Source.open("neuron", folder).sizes == replace(CODESTRAL, chunk_size=256)
    assert torch.equal(logits(out), logits(cut)) and torch.equal(
        logits(out), logits(tmp_path / "in")
    )


def test_a_tokenizer_of_another_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ssm(tmp_path / "in")
    call("mamba_ssm", tmp_path / "in", tmp_path / "without")
    said = [line for line in capsys.readouterr().out.splitlines() if "no tokenizer" in line]
    assert len(said) == 1 and "with a network: hf download state-spaces/mamba-130m-hf" in said[0]
    (tmp_path / "neox").mkdir()
    (tmp_path / "neox" / "tokenizer.json").write_text("{}")
    (tmp_path / "neox" / "tokenizer_config.json").write_text("{}")
    out = call("mamba_ssm", tmp_path / "in", tmp_path / "out", "-t", str(tmp_path / "neox"))
    assert (out / "tokenizer.json").exists() and (out / "tokenizer_config.json").exists()
    file = str(tmp_path / "neox" / "tokenizer.json")
    out = call("mamba_ssm", tmp_path / "in", tmp_path / "again", "-t", file)
    assert sorted(path.name for path in out.glob("tokenizer*")) == ["tokenizer.json"]
    assert "no tokenizer" not in capsys.readouterr().out


def test_a_config_that_says_only_what_the_program_asks_for(tmp_path: Path) -> None:
    names = ("d_model", "n_layer", "vocab_size", "pad_vocab_size_multiple", "tie_embeddings")
    ssm(tmp_path / "in", {**{name: SSM_CONFIG[name] for name in names}, "ngroups": 1})
    out = call("mamba_ssm", tmp_path / "in", tmp_path / "out")
    assert Source.open("hf", out).sizes == PUBLISHED


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-m mamba -p fp16 -i SSM -o OUT", "argument -m/--mamba2_model_type: invalid choice"),
        ("-m mamba_ssm -p fp8 -i SSM -o OUT", "argument -p/--precision: invalid choice: 'fp8'"),
        ("-m mamba_ssm -p fp16 -i SSM", "arguments are required: -o/--output_dir"),
        ("-m mamba_ssm -p fp16 -i SSM -o OUT --split", "unrecognized arguments: --split"),
        (
            "-m mamba_ssm -p fp16 -i SSM -o SSM",
            "ssm already exists; fix: give a folder that does not",
        ),
        ("-m mamba_ssm -p fp16 -i NONE -o OUT", "none/config.json does not exist"),
        (
            "-m mamba_ssm -p fp16 -i SSM -o OUT -t NONE",
            "none is not a tokenizer.json, tokenizer.mod",
        ),
        ("-m mamba_ssm -p fp16 -i CODESTRAL -o OUT", "codestral/config.json does not exist"),
        ("-m codestral -p fp16 -i SSM -o OUT", "ssm is of format state-spaces, not codestral"),
    ],
)
def test_the_command_line(words: str, message: str, tmp_path: Path) -> None:
    ssm(tmp_path / "ssm")
    codestral(tmp_path / "codestral")
    for name in ("SSM", "CODESTRAL", "NONE", "OUT"):
        words = words.replace(f" {name}", f" {tmp_path / name.lower()}")
    shown = refused(*words.split())
    assert message in shown and "\n" not in shown
    assert not (tmp_path / "out").exists()


def test_a_folder_without_its_weights(tmp_path: Path) -> None:
    words = ("-p", "fp16", "-o", tmp_path / "out")
    ssm(tmp_path / "ssm")
    (tmp_path / "ssm" / "pytorch_model.bin").unlink()
    shown = refused("-m", "mamba_ssm", "-i", tmp_path / "ssm", *words)
    assert "has no weights: neither model.safetensors nor pytorch_model.bin" in shown
    codestral(tmp_path / "codestral")
    (tmp_path / "codestral" / "consolidated.safetensors").unlink()
    shown = refused("-m", "codestral", "-i", tmp_path / "codestral", *words)
    assert shown == f"{tmp_path}/codestral/consolidated.safetensors does not exist"


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ({"n_groups": 2}, ["2 faults", "dim is missing", "n_layers is missing"]),
        ({**PARAMS, "dim": "32"}, ["dim must be a whole number of at least 1, not '32'"]),
        ({**PARAMS, "rms_norm": False}, ["rms_norm False: ours has True only"]),
        ({**PARAMS, "model_type": "transformer"}, ["model_type 'transformer': ours has 'mamba'"]),
        ({**PARAMS, "n_groups": 5}, ["n_groups: 5 do not divide the 32 channels of B and C"]),
        ({**PARAMS, "tie_embeddings": 1}, ["tie_embeddings must be true or false, not 1"]),
        ({**PARAMS, "dim": 64}, ["tensors do not match", "(48, 32), wanted (48, 64)"]),
    ],
)
def test_params_that_do_not_fit(settings: dict[str, Any], lines: list[str], tmp_path: Path) -> None:
    codestral(tmp_path / "in", settings)
    shown = refused("-m", "codestral", "-p", "fp32", "-i", tmp_path / "in", "-o", tmp_path / "out")
    assert all(line in shown for line in lines), shown


def test_a_mamba_1_model_is_refused(tmp_path: Path) -> None:
    ssm(tmp_path / "in", {**SSM_CONFIG, "ssm_cfg": {"layer": "Mamba1"}})
    words = ("-m", "mamba_ssm", "-p", "fp32", "-i", tmp_path / "in", "-o", tmp_path / "out")
    assert refused(*words).endswith("config.json: ssm_cfg.layer 'Mamba1': must be Mamba2 here")
    (tmp_path / "in" / "config.json").write_text(json.dumps({**SSM_CONFIG, "ssm_cfg": [1]}))
    assert refused(*words).endswith("config.json: ssm_cfg must be a table, not [1]")


@pytest.mark.parametrize(
    "sizes",
    [
        SIZES,
        replace(SIZES, norm_across_groups=True, bias=True, conv_bias=False),
        replace(SIZES, n_groups=1, tie_embeddings=False),
    ],
)
def test_the_layout_of_the_system_there_and_back(sizes: Mamba2Config, tmp_path: Path) -> None:
    held = weights(sizes)
    folder = tmp_path / "theirs"
    folder.mkdir()
    save_file(
        {name: one.contiguous() for name, one in split(held, sizes).items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(formats.write_neuron(sizes)))
    for form, begin, end in (
        ("neuron", "theirs", "ours"),
        ("ours", "ours", "neuron"),
        ("neuron", "neuron", "neuron-fused"),
        ("neuron", "neuron-fused", "last"),
    ):
        into = end if end.startswith(("ours", "neuron")) else "neuron"
        words = ("--from", form, tmp_path / begin, "--to", into, tmp_path / end)
        convert_weights([str(word) for word in words])
        assert Source.open(detect(tmp_path / end), tmp_path / end).sizes == sizes
    fused = load_file(tmp_path / "neuron-fused" / "model.safetensors")
    assert_equal(fused, held)
    assert_equal(load_file(tmp_path / "ours" / "model.safetensors"), held)
    for name in ("neuron", "last"):
        assert_equal(load_file(tmp_path / name / "model.safetensors"), split(held, sizes))


def test_a_layout_with_a_part_missing_is_reported(tmp_path: Path) -> None:
    ssm(tmp_path / "in")
    out = call("mamba_ssm", tmp_path / "in", tmp_path / "out", "-s")
    held = load_file(out / "model.safetensors")
    del held[f"{CORE}in_proj_dt.weight"]
    save_file(held, out / "model.safetensors")
    with pytest.raises(
        RequestError, match=r"0.mixer.in_proj_dt.weight is missing, wanted \(2, 64\)"
    ):
        Source.open("neuron", out)


def test_the_settings_of_the_system() -> None:
    settings = formats.write_neuron(SIZES)
    assert settings["rmsnorm_within_groups"] is True
    assert formats.read_neuron(settings, WHERE) == SIZES
    across = replace(SIZES, norm_across_groups=True)
    assert formats.write_neuron(across)["rmsnorm_within_groups"] is False
    assert formats.read_neuron(formats.write_neuron(across), WHERE) == across
    del settings["rmsnorm_within_groups"]
    assert formats.read_neuron(settings, WHERE) == SIZES  # the system's default
    for change, message in (
        ({"rms_norm": False}, "config.json: rms_norm False: ours has True only"),
        ({"rmsnorm_within_groups": 1}, "rmsnorm_within_groups must be true or false, not 1"),
        ({"model_type": "llama"}, "model_type 'llama': the Neuron system has mamba2 only"),
        ({"n_groups": 3}, "n_groups: 3 does not divide the 8 heads"),
    ):
        with pytest.raises(RequestError, match=message):
            formats.read_neuron({**settings, **change}, WHERE)
    with pytest.raises(RequestError, match="neuron: has Mamba-2 models only, not llama"):
        formats.write_neuron(LlamaConfig(d_model=16, n_layer=1, n_head=2, n_kv_head=1, d_ff=8))


def test_flags_of_ranks_are_for_ranks(tmp_path: Path) -> None:
    ssm(tmp_path / "in")
    words = ["--from", "state-spaces", str(tmp_path / "in"), "--to", "ours", str(tmp_path / "out")]
    with pytest.raises(RequestError, match="only --from neuron-tp needs them"):
        convert_weights([*words, "--n-groups=2"])
