"""llama_fsdp for Llama, Mixtral, Mistral, GPT-NeoX: the system's flags, with the same meaning."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from tests.training.support.runs import losses, run, steps
from training import models
from training.errors import RequestError
from training.llama_fsdp import FLAGS, configure
from training.models import LlamaConfig, MistralConfig, MixtralConfig, NeoXConfig

ENTRY_POINT = ("-m", "training.llama_fsdp")
LEAST = ("--checkpoint_dir=/x", "--dataset=text:x")
PUBLISHED = (
    "--num_key_value_heads=32",
    "--intermediate_size=11008",
    "--max_context_width=4096",
    "--hidden_width=4096",
    "--num_layers=32",
    "--num_heads=32",
    "--model_type=llama_v2",
    "--checkpoint_freq=1000",
    "--validation_freq=500",
    "--checkpoint_dir=./checkpoints",
    "--resume_from_checkpoint=./checkpoints",
)


def test_the_published_command_line() -> None:
    config = configure(PUBLISHED)
    with torch.device("meta"):
        model = models.build(config.model.sizes)
    # As the system logs: its vocabulary is 50432 if the launcher gives none.
    assert sum(one.numel() for one in model.parameters()) == 6_889_410_560
    data, run_, optim = config.data, config.run, config.optim
    assert (data.dataset_path, data.eval_dataset_path) == ("stream:allenai/c4",) * 2
    assert (data.dataset_split, data.eval_split) == ("train", "validation")
    assert (data.seq_length, data.batch_size, data.eval_batch_size) == (4096, 2, 4)
    assert (data.tokenizer, data.epochs) == ("EleutherAI/gpt-neox-20b", 3)
    assert run_.save_ckpt_path == run_.load_ckpt_path == "./checkpoints"
    assert (run_.num_steps, run_.checkpoint_interval, run_.eval_interval) == (5000, 1000, 500)
    assert (run_.report_interval, run_.seed) == (1, 12345)
    assert (optim.learning_rate, optim.weight_decay, optim.grad_clip_thresh) == (1e-4, 0.2, 1.0)
    assert (optim.schedule.name, optim.schedule.warmup) == ("cosine", 0.0032)
    assert (config.parallel.precision, config.parallel.sharding_strategy) == ("auto", "fsdp")
    assert config.parallel.fsdp_activation_checkpointing


def test_mixtral_as_it_is_launched() -> None:
    given = (
        *("--train_batch_size=4", "--max_context_width=32768", "--vocab_size=32000"),
        *("--hidden_width=4096", "--num_layers=32", "--num_heads=32", "--num_key_value_heads=8"),
        *("--intermediate_size=14336", "--model_type=mixtral", "--weight_decay=.2", "--lr=1e-4"),
        *("--min_lr=1e-5", "--warmup=.0032", "--epochs=3", "--activation_checkpointing=1"),
        *("--tokenizer=mistralai/Mixtral-8x7B-v0.1", "--dataset=allenai/c4"),
        *("--dataset_config_name=en", "--checkpoint_dir=/x", "--sharding_strategy=full"),
    )
    config = configure(given)
    with torch.device("meta"):
        model = models.build(config.model.sizes)
    assert sum(one.numel() for one in model.parameters()) == 46_702_792_704
    assert config.data.dataset_config == "en"


@pytest.mark.parametrize(
    ("flags", "kind", "sizes"),
    [
        (("llama_v2",), LlamaConfig, {"rope_theta": 1e4, "n_kv_head": 12, "d_ff": 11008}),
        (("llama_v3", "--num_key_value_heads=4"), LlamaConfig, {"rope_theta": 5e5, "n_kv_head": 4}),
        (("llama_v2", "--llama_intermediate_size=64"), LlamaConfig, {"d_ff": 64}),
        (("mistral",), MistralConfig, {"window": 4096}),
        (("mistral", "--sliding_window=0", "--rotary_emb_base=1e6"), MistralConfig, {"window": 0}),
        (("mixtral",), MixtralConfig, {"window": 0, "rope_theta": 1e6, "n_expert": 8, "top_k": 2}),
        (("gpt_neox",), NeoXConfig, {"d_ff": 3072, "hidden_dropout": 0.1, "rotary_pct": 0.25}),
        (("gpt_neox", "--resid_pdrop=0", "--attn_pdrop=0"), NeoXConfig, {"attention_dropout": 0}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_model_types(flags: Any, kind: Any, sizes: dict[str, Any]) -> None:
    model_type, *more = flags
    found = configure((*LEAST, f"--model_type={model_type}", *more)).model.sizes
    assert type(found) is kind
    assert {name: getattr(found, name) for name in sizes} == sizes


@pytest.mark.parametrize(
    ("dataset", "source"),
    [
        ("c4", "stream:allenai/c4"),
        ("wikitext", "stream:wikitext"),
        ("/fsx/data/set", "/fsx/data/set"),
        ("packed:/fsx/*.npy", "packed:/fsx/*.npy"),
    ],
)
def test_what_a_dataset_is(dataset: str, source: str) -> None:
    assert configure(("--checkpoint_dir=/x", f"--dataset={dataset}")).data.dataset_path == source
    assert (
        configure(("--checkpoint_dir=/x", f"--dataset_path={dataset}")).data.dataset_path == source
    )


@pytest.mark.parametrize("has_splits", [False, True])
def test_a_tokenized_set_in_this_folder_is_not_streamed(
    has_splits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, columns in (("tokens", {"input_ids": [[1, 2]]}), ("texts", {"text": ["a"]})):
        made = datasets.Dataset.from_dict(columns)
        (datasets.DatasetDict(train=made) if has_splits else made).save_to_disk(name)
    found = [
        configure(("--checkpoint_dir=/x", f"--dataset={name}")).data.dataset_path
        for name in ("tokens", "texts")
    ]
    assert found == ["tokens", "stream:texts"]


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (("--model_type=llama",), "--model_type: must be one of llama_v2, llama_v3"),
        (("--sharding_strategy=fsdp",), "--sharding_strategy: must be one of full, hybrid, none"),
        (("--lr_decay_style=wsd",), "--lr_decay_style: must be one of cosine"),
        (("--model_type=llama_v2", "--attn_pdrop=.1"), "--attn_pdrop: llama_v2 has none"),
        (("--intermediate_size=9",), "--intermediate_size: gpt_neox has none"),
        (("--summary_first_pdrop=.1",), "--summary_first_pdrop: gpt_neox has none"),
        (("--embd_pdrop=.2",), "gpt_neox has one dropout for this and resid_pdrop"),
        (("--num_head=3",), "there is no such flag; did you mean --num_heads?"),
        (("--bf16=2",), "--bf16: must be True, False or auto, not '2'"),
        (("--max_steps=0",), "max_steps: must be at least 1, not 0"),
        (("--num_heads=7",), "num_heads: 7 does not divide d_model 768"),
        (("--precision=fp32",), "--precision: there is no such flag"),
        ((" #", "7b:", "32"), "'7b:' is not a flag; fix: write --name=value"),
    ],
)
def test_bad_input(flags: tuple[str, ...], shown: str) -> None:
    with pytest.raises(RequestError) as error:
        configure((*LEAST, *flags))
    assert shown in str(error.value)


def test_plain_files_have_no_part_to_evaluate_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for dataset, message in (
        ("text:x", "^validation_freq: there is no eval_dataset"),
        (f"stream:{tmp_path}", "^validation_freq: .* has no split 'validation'; there are: train"),
        ("stream:/x/*.jsonl", "^dataset: no file matches /x/"),
    ):
        given = ("--checkpoint_dir=/x", f"--dataset={dataset}", "--validation_freq=5")
        with pytest.raises(RequestError, match=message):
            configure(given)


def test_no_flag_is_there_twice() -> None:
    names = [name for flag in FLAGS for name in (flag.name, *flag.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.processes
def test_errors_of_the_run_use_the_names_of_its_flags(tmp_path: Path) -> None:
    done = run(0, f"--checkpoint_dir={tmp_path}", "--dataset=text:/nowhere/*", program=ENTRY_POINT)
    assert done.returncode == 2 and done.stderr.startswith("error: dataset: no file matches")


@pytest.mark.processes
@pytest.mark.parametrize("model_type", ["llama_v2", "mixtral", "mistral", "gpt_neox"])
def test_the_published_command_line_scaled_down(tmp_path: Path, model_type: str) -> None:
    """Two processes with streamed text; stopped halfway by num_steps, it resumes by itself."""
    for name, documents in (("train", range(400)), ("held", range(400, 440))):
        lines = [json.dumps({"text": f"{n} is not {n + 1}, nor {n * n}. " * 4}) for n in documents]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sizes = (
        () if model_type == "gpt_neox" else ("--num_key_value_heads=2", "--intermediate_size=96")
    )
    flags = (
        *sizes,
        "--max_context_width=32",
        "--hidden_width=64",
        "--num_layers=2",
        "--num_heads=4",
        f"--model_type={model_type}",
        "--checkpoint_freq=3",
        "--validation_freq=2",
        f"--checkpoint_dir={tmp_path}/checkpoints",
        f"--resume_from_checkpoint={tmp_path}/checkpoints",
        f"--dataset=stream:{tmp_path}/train.jsonl",
        f"--eval_dataset_path=stream:{tmp_path}/held.jsonl",
        "--tokenizer=bytes",
        "--vocab_size=257",
    )
    first = run(2, *flags, "--max_steps=4", program=ENTRY_POINT)
    assert first.returncode == 0, first.stderr
    again = run(2, *flags, "--max_steps=6", program=ENTRY_POINT)
    assert again.returncode == 0, again.stderr
    assert "resumed from" in again.stdout and "step_4_ckp at step 4" in again.stdout
    assert "num_steps: the checkpoint was made with 4, this is 6" in again.stdout
    assert [line["step"] for line in steps(tmp_path / "checkpoints")] == list(range(1, 7))
    assert again.stdout.count("| perplexity ") == 1 and first.stdout.count("| perplexity ") == 2
    assert losses(tmp_path / "checkpoints")[-1] < losses(tmp_path / "checkpoints")[0]
