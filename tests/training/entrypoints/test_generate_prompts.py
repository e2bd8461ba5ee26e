"""Many prompts at once, the end of a text, and greedy text equal to transformers', by token."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from tests.training.entrypoints.test_generate import (
    FAMILIES,
    folder_of,
    following,
    greedy,
    made,
    tokenizer,
)
from training import models
from training.cli import run_command
from training.convert import hf
from training.convert.source import Source, load
from training.generate import decode
from training.generate.__main__ import read_prompts
from training.generate.__main__ import write_text as write
from training.generate.vocabulary import Tokens

TINY: dict[str, Any] = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {
    **TINY,
    **{"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8}
WITHIN = {"rope_theta": 100.0, "original_max_position_embeddings": 16}
LONGROPE = {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.5, 2.0, 3.0, 7.0]}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {**TINY, "state_size": 4}),
    "mamba2": (
        "mamba2",
        {**TINY, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    ),
    "llama": ("llama", HEADS),
    "mixtral": ("mixtral", {**HEADS, "num_local_experts": 3}),
    "bamba": ("bamba", {**HEADS, **MAMBA, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **{**HEADS, **MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 3},
            **{"shared_intermediate_size": 24, "residual_multiplier": 0.5},
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **{**HEADS, "layers_block_type": ["mamba", "mlp", "attention", "mamba"]},
            **{"head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8},
            # Transformers ignores it for tokens that are generated one at a time.
            **{"n_groups": 2, "chunk_size": 8, "time_step_min": 1e-9},
        },
    ),
    # Both exceed the first context while generating.
    "dynamic": (
        "llama",
        {
            **HEADS,
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
        },
    ),
    "longrope": (
        "llama",
        {
            **HEADS,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "longrope", **WITHIN, **LONGROPE},
        },
    ),
}
PROMPTS = (
    "the quick fox",
    "a lazy dog is",
    "é😀",
    "rain",
    "the quick fox",
    "it rains and rains on",
)


def saved(name: str, folder: Path) -> Any:
    """Save a transformers model with large matrices in a folder; returns it."""
    family, settings = CONFIGS[name]
    torch.manual_seed(1)
    none = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(family, **settings, **none)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model.eval()


def theirs(model: Any, prompt: list[int], count: int, eos: int | None = None) -> list[int]:
    """Generate greedily with transformers, without the end token."""
    settings = transformers.GenerationConfig(
        max_new_tokens=count, do_sample=False, eos_token_id=eos, pad_token_id=0
    )
    ids = torch.tensor([prompt])  # (1, l)
    # Copy it, as a model keeps dynamic angles for the longest text that it has seen.
    model = copy.deepcopy(model)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    found: list[int] = out[0, len(prompt) :].tolist()
    return found[: found.index(eos)] if eos in found else found


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_is_transformers_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also stops at the same place; the prompt is read in pieces if that changes nothing."""
    monkeypatch.setattr(decode, "AT_ONCE", 5)
    model = saved(name, tmp_path / "hf")
    here = load(Source.open("hf", tmp_path / "hf"), torch.device("cpu"), torch.float32)
    for text in ("the quick", "the quick fox jumps over"):
        prompt = list(text.encode())
        expected = theirs(model, prompt, 20)
        assert following(here, prompt, 20, greedy()) == expected and len(set(expected)) > 3
        eos = expected[7]
        until = following(here, prompt, 20, greedy(), {eos})
        assert until == theirs(model, prompt, 20, eos) == expected[: expected.index(eos)]


def written(capsys: Any, *words: Any) -> str:
    assert run_command(write, [str(word) for word in words]) == 0
    said: str = capsys.readouterr().out
    return said


def lines_of(text: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("flags", [("--temperature=0",), ("--temperature=1.5", "--top-k=40")])
def test_each_text_is_what_its_prompt_gives_alone(
    family: str, flags: tuple[str, ...], tmp_path: Path, capsys: Any
) -> None:
    folder = folder_of(FAMILIES[family], tmp_path / "model")
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    flags = ("--max-new-tokens=12", "--seed=5", *flags)
    alone = {
        prompt: written(capsys, folder, f"--prompt={prompt}", *flags).removesuffix("\n")
        for prompt in PROMPTS
    }
    assert len(set(alone.values())) == len(PROMPTS) - 1  # one occurs twice
    for batch in ("--batch-size=2", "--batch-size=8"):
        found = lines_of(written(capsys, folder, f"--prompts={file}", batch, *flags))
        assert [line["prompt"] for line in found] == list(PROMPTS)
        assert [line["text"] for line in found] == [alone[prompt] for prompt in PROMPTS]


def test_each_text_of_a_batch_ends_by_itself() -> None:
    here = made(FAMILIES["mamba"])
    prompts = [list(b"the quick"), list(b"lazy dogs"), list(b"it rained")]
    free = [following(here, prompt, 20, greedy()) for prompt in prompts]
    ends = {max(set(tokens), key=tokens.index) for tokens in free[:2]}  # the latest to occur first
    stops = [next((at for at, token in enumerate(tokens) if token in ends), 20) for tokens in free]
    assert min(stops) > 0 and len(set(stops)) > 1
    steps = list(decode.generate(here, prompts, 20, [greedy()] * 3, ends))
    for row, (tokens, stop) in enumerate(zip(free, stops, strict=True)):
        assert [step[row] for step in steps] == (tokens[:stop] + [None] * 20)[: max(stops)]


def cut_short(folder: Path, capsys: Any, whole: str) -> str:
    """Return the output once the folder states an end; it must be a prefix of the whole text."""
    text = written(capsys, folder, "--prompt=the dog", "--max-new-tokens=30", "--temperature=0")
    assert whole.startswith(text.removesuffix("\n")) and len(text) < len(whole)
    return text


def test_where_the_end_is_stated(tmp_path: Path, capsys: Any) -> None:
    """By generation_config.json, else config.json, else the tokenizer's files: as transformers."""
    sizes = models.LlamaConfig(
        d_model=32, n_layer=2, vocab_size=300, n_head=4, n_kv_head=2, d_ff=48, context=64
    )
    folder = folder_of(sizes, tmp_path / "llama")
    vocabulary = Tokens(tokenizer(folder, "byte level"))
    words = ("--prompt=the dog", "--max-new-tokens=30", "--temperature=0")
    whole = written(capsys, folder, *words)
    here = load(Source.open("ours", folder), torch.device("cpu"), torch.float32)
    pick = greedy(vocabulary.size)
    prompt = vocabulary.encode("the dog")
    free = following(here, prompt, 30, pick)
    first, second, third = (free[at] for at in (4, 10, 16))
    assert len({first, second, third}) == 3

    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": vocabulary._tokenizer.id_to_token(third)})
    )
    by_tokenizer = cut_short(folder, capsys, whole)
    config = hf.write(sizes) | {"eos_token_id": second}
    (folder / "config.json").write_text(json.dumps(config))
    by_config = cut_short(folder, capsys, whole)
    stated = folder / "generation_config.json"
    stated.write_text(json.dumps({"eos_token_id": [299, first]}))
    by_generation = cut_short(folder, capsys, whole)
    assert len(by_generation) < len(by_config) < len(by_tokenizer)
    stated.write_text(json.dumps({"eos_token_id": "end"}))
    assert run_command(write, [str(folder), *words]) == 2
    assert "eos_token_id must be token ids, not 'end'" in capsys.readouterr().err


@pytest.mark.parametrize("of_file", ["truncation", "padding", "end"])
def test_a_prompt_is_the_tokens_that_training_would_read(of_file: str, tmp_path: Path) -> None:
    """With the tokenizer's start token, but without its file's truncation and end tokens."""
    import tokenizers

    path = tokenizer(tmp_path, "byte level")
    made = tokenizers.Tokenizer.from_file(str(path))
    made.add_special_tokens(["<s>", "</s>"])
    begin, end = (made.token_to_id(one) for one in ("<s>", "</s>"))
    plain = made.encode("the quick fox jumps", add_special_tokens=False).ids
    assert 3 < len(plain) < 30
    if of_file == "truncation":
        made.enable_truncation(3)
    elif of_file == "padding":
        made.enable_padding(length=30)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>" if of_file == "end" else "<s> $A",
        special_tokens=[("<s>", begin), ("</s>", end)],
    )
    made.save(str(path))
    vocabulary = Tokens(path)
    assert vocabulary.encode("the quick fox jumps") == [begin, *plain]
    assert vocabulary.encode("") == [begin]


def test_a_mark_of_utf_8_at_the_beginning_of_a_file_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    """Windows editors write one."""
    file = tmp_path / "prompts.txt"
    file.write_bytes("über\r\nthe quick\n".encode("utf-8-sig"))
    assert read_prompts(file) == ["über", "the quick"]


def test_prompts_that_cannot_be_taken_are_reported_by_their_lines(
    tmp_path: Path, capsys: Any
) -> None:
    folder = folder_of(
        models.LlamaConfig(
            d_model=32, n_layer=1, vocab_size=256, n_head=4, n_kv_head=2, d_ff=48, context=20
        ),
        tmp_path / "llama",
    )
    file = tmp_path / "prompts.txt"
    words = [str(folder), f"--prompts={file}", "--max-new-tokens=5"]
    file.write_text("short\n\nfar too long for it\n")
    assert run_command(write, words) == 2
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "error: 2 faults" and len(shown) == 3
    assert f"--prompts: {file}: line 2: is empty" in shown[1]
    assert f"--prompts: {file}: line 3: its 19 tokens and --max-new-tokens=5 are more" in shown[2]
    file.write_text("")
    assert run_command(write, words) == 2
    assert f"--prompts: {file} is empty; fix: write one prompt per line" in capsys.readouterr().err
    file.write_bytes(b"\xff\xfe")
    assert run_command(write, words) == 2
    assert f"--prompts: {file} is not UTF-8" in capsys.readouterr().err
