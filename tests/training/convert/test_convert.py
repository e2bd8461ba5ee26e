"""Conversion of weights: whatever way a model goes, transformers and ours compute the same."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    GPTNeoXConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
)

from tests.training.support.runs import ROOT, train, write_text
from training import models
from training.convert.__main__ import convert
from training.convert.source import Source, load
from training.convert.target import write_model

TINY: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {**TINY, "intermediate_size": 48, "num_attention_heads": 4}
GROUPED: dict[str, Any] = {**HEADS, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MAMBA2 = {**TINY, "state_size": 8, "num_heads": 4, "head_dim": 16, "chunk_size": 8}
BAMBA: dict[str, Any] = {
    **{**GROUPED, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8},
    "pad_token_id": None,
}
NEMOTRON: dict[str, Any] = {
    **{"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "pad_token_id": None},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10},
    **{"mamba_num_heads": 4, "mamba_head_dim": 12, "ssm_state_size": 8, "n_groups": 2},
}

CONFIGS: dict[str, Any] = {
    "mamba": lambda: MambaConfig(**TINY, state_size=4),
    "mamba untied, biased": lambda: MambaConfig(
        **TINY, tie_word_embeddings=False, use_bias=True, use_conv_bias=False, expand=3
    ),
    "mamba2": lambda: Mamba2Config(**MAMBA2, n_groups=1, tie_word_embeddings=True),
    "mamba2 of two groups": lambda: Mamba2Config(**MAMBA2, n_groups=2, use_bias=True),
    "llama": lambda: LlamaConfig(**GROUPED),
    "llama tied, biased": lambda: LlamaConfig(
        **HEADS, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=16
    ),
    "llama llama3": lambda: LlamaConfig(**GROUPED, rope_parameters=LLAMA3),
    "llama linear": lambda: LlamaConfig(
        **GROUPED, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=5),
    "mistral without a window": lambda: MistralConfig(**GROUPED, sliding_window=None),
    "mixtral": lambda: MixtralConfig(**GROUPED, num_local_experts=3),
    "gpt_neox": lambda: GPTNeoXConfig(**HEADS),
    "gpt_neox otherwise": lambda: GPTNeoXConfig(
        **HEADS,
        use_parallel_residual=False,
        attention_bias=False,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "bamba": lambda: BambaConfig(**BAMBA, attn_layer_indices=[1]),
    "bamba otherwise": lambda: BambaConfig(
        **BAMBA,
        attn_layer_indices=[0],
        tie_word_embeddings=True,
        mamba_n_groups=2,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        time_step_limit=[0.01, 0.5],
    ),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **BAMBA,
        layer_types=["mamba", "attention"],
        num_local_experts=3,
        shared_intermediate_size=24,
        embedding_multiplier=3,
        residual_multiplier=0.4,
        attention_multiplier=0.125,
        logits_scaling=2,
        tie_word_embeddings=True,
    ),
    "granitemoehybrid without experts": lambda: GraniteMoeHybridConfig(
        **BAMBA,
        layer_types=["attention", "mamba"],
        num_local_experts=0,
        num_experts_per_tok=0,
        attention_multiplier=0.3,
        position_embedding_type="rope",
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **NEMOTRON, layers_block_type=["mamba", "mlp", "attention", "mamba"]
    ),
    "nemotron_h by letters": lambda: NemotronHConfig(
        **{**NEMOTRON, "hybrid_override_pattern": "*M-"}, use_bias=True, mlp_bias=True
    ),
}


def reference(name: str, seed: int = 0) -> nn.Module:
    """A model of transformers whose every parameter is random, norms and biases too."""
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(
        CONFIGS[name](), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def saved(model: nn.Module, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)  # type: ignore[operator]
    return folder


def theirs(folder: Path, **options: Any) -> nn.Module:
    """Read by transformers; strict, for it only warns of tensors that are not as it wants."""
    read: Any = AutoModelForCausalLM.from_pretrained
    model, told = read(folder, attn_implementation="eager", output_loading_info=True, **options)
    assert not any(told.values()), told
    result: nn.Module = model.eval()
    return result


def ours(form: str, folder: Path) -> nn.Module:
    return load(Source.open(form, folder), torch.device("cpu"), torch.float32)


def logits(model: nn.Module) -> Tensor:
    ids = torch.randint(40, (2, 19), generator=torch.Generator().manual_seed(5))  # (b, l)
    with torch.no_grad():
        out = model(ids)
    return out if isinstance(out, Tensor) else out.logits  # (b, l, v)


def run(*words: Any) -> None:
    convert([str(word) for word in words])


def tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(str(path), framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for path in folder.glob("*.bin"):
        found |= torch.load(path, weights_only=True)
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=0, atol=0, msg=name)


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
    # And what transformers writes of what we wrote reads as the same sizes.
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
    # mamba-ssm loads strictly: the names of its MambaLMHeadModel, the tied one too.
    held = torch.load(tmp_path / "ss" / "pytorch_model.bin", weights_only=True)
    names = {n.replace("embeddings", "embedding") for n in model.state_dict()}
    assert held.keys() == names and "lm_head.weight" in names
    size = (tmp_path / "ss" / "pytorch_model.bin").stat().st_size
    assert size < sum(p.nbytes for p in model.parameters()) + 40_000  # a tied tensor is there once
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
"""What fms-fsdp writes of its mamba_9.8b, with small sizes."""


def test_bamba_as_fms_fsdp_has_it(tmp_path: Path) -> None:
    """mamba-ssm's names: q, k and v are one tensor, and so are an MLP's first two, up first."""
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


@pytest.mark.parametrize("name", ["mamba", "mixtral"])
def test_shards(name: str, tmp_path: Path) -> None:
    model = reference(name)
    first = saved(model, tmp_path / "first", max_shard_size="20KB")
    run("--from", "hf", first, "--to", "ours", tmp_path / "ours", "--max-shard-size=12KB")
    run("--from", "ours", tmp_path / "ours", "--to", "hf", tmp_path / "hf", "--max-shard-size=9KiB")
    assert torch.equal(logits(theirs(tmp_path / "hf")), logits(model))
    for folder, most in ((tmp_path / "ours", 12_000), (tmp_path / "hf", 9 * 1024)):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
        assert sorted(set(index["weight_map"].values())) == files
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(folder).values())
        for file in files:
            with safe_open(str(folder / file), framework="pt") as held:
                assert held.metadata() == {"format": "pt"}
                sizes = [held.get_tensor(n).nbytes for n in held.keys()]  # noqa: SIM118
            assert sum(sizes) <= most or len(sizes) == 1


@pytest.mark.parametrize("sharded", [False, True])
def test_torch_files_of_hugging_face(sharded: bool, tmp_path: Path) -> None:
    model = reference("llama")
    saved(model, tmp_path / "hf")
    state = {n: v.clone() for n, v in model.state_dict().items()}
    # What old releases stored beside the weights.
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    (tmp_path / "hf" / "model.safetensors").unlink()
    if sharded:
        names = list(state)
        table = {n: f"pytorch_model-0000{i % 2 + 1}-of-00002.bin" for i, n in enumerate(names)}
        for file in set(table.values()):
            torch.save({n: state[n] for n in names if table[n] == file}, tmp_path / "hf" / file)
        index = {"metadata": {}, "weight_map": table}
        (tmp_path / "hf" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        path = tmp_path / "hf" / "pytorch_model.bin"
        torch.save(state, path, _use_new_zipfile_serialization=False)
    run("--from", "hf", tmp_path / "hf", "--to", "hf", tmp_path / "back")
    assert torch.equal(logits(theirs(tmp_path / "back")), logits(model))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", ["hf", "ours", "state-spaces"])
def test_dtype(dtype: str, form: str, tmp_path: Path) -> None:
    model = reference("mamba")
    first = saved(model, tmp_path / "first")
    run("--from", "hf", first, "--to", form, tmp_path / "out", "--dtype", dtype)
    wanted = getattr(torch, dtype)
    found = tensors(tmp_path / "out")
    assert {value.dtype for value in found.values()} == {wanted}
    if form == "hf":
        assert theirs(tmp_path / "out").dtype == wanted  # it goes by config.json
    state = model.to(wanted).state_dict()
    for name, value in found.items():
        assert torch.equal(value, state[name.replace("embedding.", "embeddings.")])


def test_who_may_read_a_plain_file_may_read_what_is_written(tmp_path: Path) -> None:
    first = saved(reference("mamba"), tmp_path / "first")
    run("--from", "hf", first, "--to", "ours", tmp_path / "out", "--max-shard-size=9KB")
    (tmp_path / "plain").touch()
    plain = (tmp_path / "plain").stat().st_mode
    assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {plain}


def test_files_of_a_tokenizer_go_along(tmp_path: Path) -> None:
    first = saved(reference("mamba"), tmp_path / "first")
    (first / "tokenizer.json").write_text("{}")
    (first / "notes.txt").write_text("not this")
    run("--from", "hf", first, "--to", "ours", tmp_path / "ours")
    names = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["family"] == "mamba"


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


MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from training import models
from training.convert.source import Source
from training.convert.target import write_model

def held():  # bytes of memory that no file backs
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024

most, done = 0, False
def watch():
    global most
    while not done:
        most = max(most, held())
        time.sleep(0.001)

models.build(models.MambaConfig(d_model=64, n_layer=1, vocab_size=8))  # imports count for nothing
start = held()
thread = threading.Thread(target=watch)
thread.start()
folder = Path(sys.argv[1])
for begin, end, into, shard in (
    ("ours", "hf", "hf", 10**7),
    ("hf", "state-spaces", "state-spaces", None),
    ("state-spaces", "ours", "again", 10**7),
):
    write_model(Source.open(begin, folder / begin), end, folder / into, torch.float32, shard)
done = True
thread.join()
print(most - start)
"""


@pytest.mark.processes
def test_memory_is_that_of_a_shard_and_a_tensor(tmp_path: Path) -> None:
    sizes = models.MambaConfig(d_model=512, n_layer=24, vocab_size=256)
    folder = tmp_path / "ours"
    folder.mkdir()
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in models.build(sizes).named_parameters()}
    held = {n: torch.ones(s, dtype=torch.bfloat16) for n, s in shapes.items()}
    save_file(held, str(folder / "model.safetensors"))
    settings = {"family": "mamba", "sizes": asdict(sizes)}
    (folder / "config.json").write_text(json.dumps(settings))
    whole = sum(value.numel() for value in held.values()) * 4
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert measured.returncode == 0, measured.stderr
    # Shards of 10 MB and parameters of 4 MB; the allocator keeps some more.
    assert whole > 160e6 and int(measured.stdout) < 70e6
    assert_same(tensors(tmp_path / "again"), tensors(tmp_path / "hf"))
