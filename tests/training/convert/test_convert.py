"""Conversion of weights: in every direction, transformers and our models compute the same."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.training.support.converted import (
    CONFIGS,
    assert_same,
    logits,
    ours,
    reference,
    run,
    saved,
    tensors,
    theirs,
)
from tests.training.support.runs import train, write_text
from training import models
from training.convert.source import Source
from training.convert.target import write_model


@pytest.mark.parametrize("name", CONFIGS)
def test_hugging_face_and_back(name: str, tmp_path: Path) -> None:
    model = reference(name)
    first = saved(model, tmp_path / "first")
    run("--from", "hf", first, "--to", "ours", tmp_path / "ours")
    run("--from", "ours", tmp_path / "ours", "--to", "hf", tmp_path / "back")
    torch.testing.assert_close(logits(ours("hf", first)), logits(model), rtol=0, atol=1e-4)
    here = ours("ours", tmp_path / "ours")
    torch.testing.assert_close(logits(here), logits(model), rtol=0, atol=1e-4)
    back = theirs(tmp_path / "back")
    assert torch.equal(logits(back), logits(model))
    assert_same(tensors(first), tensors(tmp_path / "back"))
    # What transformers writes from our output is read with the same sizes.
    again = saved(back, tmp_path / "again")
    assert Source.open("hf", again).sizes == Source.open("ours", tmp_path / "ours").sizes


@pytest.mark.parametrize("name", ["mamba", "mamba2", "mamba untied, biased"])
def test_state_spaces_and_back(name: str, tmp_path: Path) -> None:
    model = reference(name)
    first = saved(model, tmp_path / "first")
    run("--from", "hf", first, "--to", "state-spaces", tmp_path / "ss")
    run("--from", "state-spaces", tmp_path / "ss", "--to", "hf", tmp_path / "back")
    torch.testing.assert_close(
        logits(ours("state-spaces", tmp_path / "ss")), logits(model), rtol=0, atol=1e-4
    )
    assert torch.equal(logits(theirs(tmp_path / "back")), logits(model))
    # mamba-ssm loads strictly: it needs all names of its MambaLMHeadModel, including the tied one.
    held = torch.load(tmp_path / "ss" / "pytorch_model.bin", weights_only=True)
    names = {n.replace("embeddings", "embedding") for n in model.state_dict()}
    assert held.keys() == names and "lm_head.weight" in names
    size = (tmp_path / "ss" / "pytorch_model.bin").stat().st_size
    assert size < sum(p.nbytes for p in model.parameters()) + 40_000  # a tied tensor is stored once
    assert sorted(p.name for p in (tmp_path / "ss").iterdir()) == [
        *("config.json", "generation_config.json", "pytorch_model.bin"),
    ]


FMS_FSDP: dict[str, Any] = {
    **{"d_model": 32, "d_intermediate": 128, "n_layer": 3, "vocab_size": 37},
    "ssm_cfg": {"layer": "Mamba2", "headdim": 16, "d_state": 8},
    "attn_layer_idx": [1],
    "attn_cfg": {
        **{"causal": True, "d_conv": 0, "head_dim": 8, "num_heads": 4, "num_heads_kv": 2},
        **{"out_proj_bias": False, "qkv_proj_bias": False, "rotary_emb_dim": 4},
    },
    **{"rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True},
    **{"pad_vocab_size_multiple": 16, "tie_embeddings": False},
}
"""What fms-fsdp writes for its mamba_9.8b, with small sizes."""


def test_bamba_as_fms_fsdp_has_it(tmp_path: Path) -> None:
    """With mamba-ssm's names: q, k and v are one tensor, and an MLP's first two too, up first."""
    made: dict[str, Any] = {
        **{"d_model": 32, "n_layer": 3, "pattern": "M*M", "vocab_size": 48, "n_head": 4},
        **{"n_kv_head": 2, "d_ff": 128, "n_mamba_head": 4, "mamba_head_dim": 16, "d_state": 8},
    }
    sizes = models.BambaConfig(**made)
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in models.build(sizes).named_parameters()}
    held = {n: torch.randn(shape) * 0.1 for n, shape in shapes.items()}
    before = {n: v for n, v in held.items() if n.startswith("model.layers.1.")}
    q, k, v, o = (before[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkvo")
    up, gate, down = (
        before[f"model.layers.1.feed_forward.{n}_proj.weight"] for n in ("up", "gate", "down")
    )
    layer = "backbone.layers.1."
    theirs = {
        f"{layer}mixer.in_proj.weight": torch.cat([q, k, v]),
        f"{layer}mixer.out_proj.weight": o,
        f"{layer}mlp.fc1.weight": torch.cat([up, gate]),
        f"{layer}mlp.fc2.weight": down,
        f"{layer}norm.weight": before["model.layers.1.input_layernorm.weight"],
        f"{layer}norm2.weight": before["model.layers.1.pre_ff_layernorm.weight"],
        "backbone.embedding.weight": held["model.embed_tokens.weight"],
        "backbone.norm_f.weight": held["model.final_layernorm.weight"],
        "backbone.layers.2.mixer.in_proj.weight": held["model.layers.2.mamba.in_proj.weight"],
    }
    folder = tmp_path / "ours"
    folder.mkdir()
    save_file(held, str(folder / "model.safetensors"))
    settings = {"family": "bamba", "sizes": asdict(sizes)}
    (folder / "config.json").write_text(json.dumps(settings))
    run("--from", "ours", folder, "--to", "state-spaces", tmp_path / "fms")
    found = tensors(tmp_path / "fms")
    for name, value in theirs.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)
    assert Source.open("state-spaces", tmp_path / "fms").sizes == sizes
    (tmp_path / "fms" / "config.json").write_text(json.dumps(FMS_FSDP))
    assert Source.open("state-spaces", tmp_path / "fms").sizes == sizes
    run("--from", "state-spaces", tmp_path / "fms", "--to", "ours", tmp_path / "back")
    assert_same(tensors(tmp_path / "back"), held)


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2"])
def test_a_published_state_spaces_folder(layer: str, tmp_path: Path) -> None:
    """The vocabulary is the tokens', the embedding is padded, and most settings are left out."""
    kind = models.Mamba2Config if layer == "Mamba2" else models.MambaConfig
    sizes = kind(d_model=64, n_layer=2, vocab_size=48)
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in models.build(sizes).named_parameters()}
    held = {
        n.replace("embeddings", "embedding"): torch.randn(shape) * 0.1
        for n, shape in shapes.items()
    }
    held["lm_head.weight"] = held["backbone.embedding.weight"]
    folder = tmp_path / "published"
    folder.mkdir()
    torch.save(held, folder / "pytorch_model.bin")
    settings: dict[str, Any] = {
        "d_model": 64,
        "n_layer": 2,
        "vocab_size": 37,
        "ssm_cfg": {} if layer == "Mamba1" else {"layer": "Mamba2"},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    assert Source.open("state-spaces", folder).sizes == sizes
    run("--from", "state-spaces", folder, "--to", "hf", tmp_path / "hf")
    torch.testing.assert_close(
        logits(theirs(tmp_path / "hf")), logits(ours("state-spaces", folder)), rtol=0, atol=1e-4
    )


@pytest.mark.processes
def test_a_run_saved_by_two_ranks(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    data = write_text(tmp_path / "text")
    train(tmp_path / "run", data, 2, 2, 4, "--checkpoint_interval=2")
    folder = tmp_path / "run"
    run("--from", "ours", folder, "--to", "ours", tmp_path / "newest")
    step = folder / "checkpoints" / "step_2_ckp"
    run("--from", "ours", step, "--to", "hf", tmp_path / "older")
    for name, checkpoint in (
        ("newest", folder / "checkpoints" / "step_4_ckp"),
        ("older", step),
    ):
        dcp_to_torch_save(checkpoint, tmp_path / "whole.pt")
        whole = torch.load(tmp_path / "whole.pt", weights_only=False)["model"]
        assert_same(tensors(tmp_path / name), whole)
    torch.testing.assert_close(
        logits(theirs(tmp_path / "older")), logits(ours("ours", step)), rtol=0, atol=1e-4
    )


def test_sizes_with_a_scaling_of_positions_come_back(tmp_path: Path) -> None:
    scaling = models.RopeScaling(kind="llama3", factor=8.0)
    sizes = models.LlamaConfig(
        d_model=16, n_layer=1, n_head=2, n_kv_head=1, d_ff=8, vocab_size=12, rope_scaling=scaling
    )
    folder = tmp_path / "weights"
    folder.mkdir()
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in models.build(sizes).named_parameters()}
    save_file({n: torch.ones(s) for n, s in shapes.items()}, str(folder / "model.safetensors"))
    settings = {"family": "llama", "sizes": asdict(sizes)}
    (folder / "config.json").write_text(json.dumps(settings))
    source = Source.open("ours", folder)
    assert source.sizes == sizes
    write_model(source, "hf", tmp_path / "hf", None, None)
    assert Source.open("hf", tmp_path / "hf").sizes == sizes
