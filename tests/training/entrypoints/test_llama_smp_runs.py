"""Runs of the entry point for SMP v2 over gloo: sharded, resumed, finetuned, written out."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.support.events import curves
from tests.training.support.runs import losses, run, steps

pytestmark = pytest.mark.processes

ENTRY_POINT = ("-m", "training.llama_smp")
MODEL = (
    *("--model_type", "llama_v2", "--hidden_width", "64", "--num_layers", "3", "--num_heads", "4"),
    *("--num_key_value_heads", "2", "--llama_intermediate_size", "96", "--vocab_size", "257"),
    *("--max_context_width", "32", "--lr", "3e-3", "--lr_decay_iters", "100", "--bf16", "0"),
    *("--use_smp_implementation", "1", "--checkpoint_freq", "100"),
)
SYNTHETIC = ("--use_synthetic_data", "1", "--dataset_type", "hf")


def train(save: Path, ranks: int, *flags: str, program: Any = ENTRY_POINT) -> str:
    """Train to the end; returns the output."""
    done = run(ranks, *MODEL, f"--checkpoint_dir={save}", *flags, program=program)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_lines(folder: Path, begins: range) -> None:
    folder.mkdir()
    rows = [[(start + place) % 16 for place in range(40)] for start in begins]
    lines = [json.dumps({"input_ids": row, "attention_mask": [1] * 40}) for row in rows]
    half = len(lines) // 2
    for name, part in (("a", lines[:half]), ("b", lines[half:])):
        (folder / f"{name}.json.gz").write_bytes(gzip.compress("\n".join(part).encode()))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("data")
    write_lines(folder / "train", range(200))
    write_lines(folder / "test", range(200, 216))
    return f"--training_dir={folder}/train", f"--test_dir={folder}/test", "--zipped_data=1"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data: tuple[str, ...]) -> Any:
    """A run that was stopped by num_steps and started again, and both outputs."""
    folder = tmp_path_factory.mktemp("trained")
    flags = (
        *data,
        *("--validation_freq=3", "--validation_batches=0", "--checkpoint_freq=2"),
        *("--num_kept_checkpoints=2", "--train_batch_size=4", "--logging_freq=2"),
        *(f"--tensorboard_dir={folder}/events", "--enable_memory_profiling=1"),
        *("--save_final_model=1", f"--model_dir={folder}/model"),
    )
    first = train(folder / "save", 2, *flags, "--max_steps=4")
    (folder / "first").write_bytes((folder / "model" / "model.safetensors").read_bytes())
    return folder, first, train(folder / "save", 2, *flags, "--max_steps=6")


def test_a_run_goes_on_by_itself(trained: Any) -> None:
    folder, first, again = trained
    assert first.startswith("torch.sagemaker is not installed: torch's own FSDP and tensor")
    assert "fp8: off, as this is not a GPU" in first
    assert "step_4_ckp at step 4" in again and "done: 6 steps" in again
    save = folder / "save"
    assert [line["step"] for line in steps(save)] == [1, 2, 3, 4, 5, 6]
    assert losses(save)[-1] < losses(save)[0] - 0.2
    kept = sorted(one.name for one in (save / "checkpoints").iterdir())
    assert kept == ["step_4_ckp", "step_6_ckp"]


def test_files_of_the_other_kind_are_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "packed", range(40))
    (tmp_path / "plain").mkdir()
    for file in (tmp_path / "packed").iterdir():
        (tmp_path / "plain" / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    save = f"--checkpoint_dir={tmp_path}/save"
    for name, zipped, there in (("packed", 0, r"*.json.gz"), ("plain", 1, "*.json")):
        flags = (*MODEL, save, f"--training_dir={tmp_path}/{name}", f"--zipped_data={zipped}")
        done = run(0, *flags, "--max_steps=1", program=ENTRY_POINT)
        answer = f"files, but {there}; fix: write lines:{tmp_path}/{name}/{there}"
        assert done.returncode == 2 and answer in done.stderr, done.stderr
        flags = (*MODEL, save, f"--training_dir=lines:{tmp_path}/{name}/{there}", "--max_steps=1")
    done = run(0, *flags, program=ENTRY_POINT)
    assert done.returncode == 0, done.stderr


def test_zipped_data_and_plain_data_are_the_same(tmp_path: Path) -> None:
    """According to the system's document, json needs no flag, and json.gz needs --zipped_data 1."""
    write_lines(tmp_path / "packed", range(40))
    (tmp_path / "plain").mkdir()
    for file in (tmp_path / "packed").iterdir():
        (tmp_path / "plain" / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    found = []
    for name, flags in (("packed", ("--zipped_data", "1")), ("plain", ())):
        shown = train(
            *(tmp_path / f"{name}-save", 0, f"--training_dir={tmp_path}/{name}", *flags),
            "--max_steps=3",
        )
        assert ("zipped_data: 0" in shown) == (name == "plain")
        found.append(losses(tmp_path / f"{name}-save"))
    assert found[0] == found[1] and len(found[0]) == 3


def test_it_tells_what_the_system_tells(trained: Any) -> None:
    folder, first, again = trained
    assert re.search(r"step 4/4 \| loss .* s/step \| [\d,k]+ tokens/s$", first, re.MULTILINE)
    count = int(re.search(r"llama_v2: ([\d,]+) parameters", first)[1].replace(",", ""))  # type: ignore[index]
    written = map(json.loads, (folder / "save" / "metrics.jsonl").read_text().splitlines())
    for report in [one for one in written if one["kind"] == "report"]:
        speed = report["samples_per_second"]
        assert speed == pytest.approx(report["tokens_per_second_per_device"] * 2 / 32)
        assert report["tflops"] == pytest.approx(6 * speed * count * 32 / 2 * 1e-12)
    shown = {tag: [step for step, _ in points] for tag, points in curves(folder / "events").items()}
    assert sorted(shown) == [
        *("LR/learning_rate", "Loss/perplexity", "Loss/train", "Loss/val", "Norms/grad_norm"),
        *("Perf/ModelTFLOPs", "Perf/SeqPerSec"),
    ]
    assert shown["Loss/train"] == [1, 2, 3, 4, 5, 6] and shown["Loss/val"] == [3, 4, 6]
    assert "memory after model (step 0): host " in first
    assert "memory after optimizer (step 5): host " in again
    memory = map(json.loads, (folder / "save" / "memory.jsonl").read_text().splitlines())
    places = [(one["step"], one["place"]) for one in memory]
    assert (1, "backward") in places and (3, "evaluation") in places and (6, "save") in places
    assert (2, "backward") not in places


def test_the_final_model_is_transformers_own(trained: Any, data: tuple[str, ...]) -> None:
    """Its loss on the held-out lines is the last one that the run reported."""
    from transformers import AutoModelForCausalLM

    folder, _, again = trained
    assert f"wrote {folder}/model: the model of step_6_ckp" in again
    assert (folder / "first").read_bytes() != (folder / "model/model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    shown = [json.loads(one) for one in (folder / "save/metrics.jsonl").read_text().splitlines()]
    last = [one for one in shown if one["kind"] == "evaluation"][-1]
    assert last["tokens"] == 16 * 32
    from training.data.lines import Lines

    samples = Lines(Path(data[1].partition("=")[2]), 32, seed=12345)
    batch = [samples[index] for index in range(len(samples))]
    inputs = torch.stack([one.inputs for one in batch])  # (b, l)
    targets = torch.stack([one.targets for one in batch])  # (b, l)
    with torch.no_grad():
        logits = model(inputs).logits  # (b, l, v)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(last["loss"], abs=1e-5)


def test_a_finished_run_that_is_started_again_ends_well(trained: Any, data: Any) -> None:
    folder = trained[0]
    flags = (*data, "--save_final_model=1", "--train_batch_size=4", "--max_steps=6")
    shown = train(folder / "save", 0, *flags, f"--model_dir={folder}/model")
    assert "done: 6 steps" in shown and "the model of step_6_ckp" in shown
    flags = (*MODEL, f"--checkpoint_dir={folder}/save", *flags, f"--model_dir={folder}/save")
    done = run(0, *flags, program=ENTRY_POINT)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: model_dir: {folder}/save and save_ckpt_path ")


def test_finetuning_begins_with_the_pretrained_model(
    tmp_path: Path, trained: Any, data: tuple[str, ...]
) -> None:
    """By its folder, by one file of weights, and by the program's own flag: the same first loss."""
    from safetensors.torch import load_file

    folder = trained[0] / "model"
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    by_name = (f"--pretrained_model_name={folder}", f"--finetune_checkpoint_load_dir={folder}")
    by_file = ("--pretrained_checkpoint_file=pytorch_model.bin",)
    ways = {
        "name": (0, ("--finetune=1", *by_name)),
        "file": (2, ("--finetune=1", f"--finetune_checkpoint_load_dir={tmp_path}", *by_file)),
        "own": (0, (f"--hf_pretrained_model_name_or_dir={folder}", "--delayed_param=0")),
    }
    found = {}
    for name, (ranks, flags) in ways.items():
        batch = f"--train_batch_size={4 // max(1, ranks)}"
        train(tmp_path / name, ranks, *data, *flags, "--max_steps=2", batch)
        found[name] = losses(tmp_path / name)
    assert found["name"] == found["own"] == pytest.approx(found["file"], abs=1e-5)
    assert found["name"][0] < losses(trained[0] / "save")[0] - 0.2
    flags = (*data, "--finetune=1", *by_name, "--max_steps=3", "--train_batch_size=4")
    checkpoint = tmp_path / "name" / "checkpoints" / "step_2_ckp"
    shown = train(tmp_path / "more", 0, *flags, f"--resume_from_checkpoint={checkpoint}")
    assert "init_weights: not read, as there is a checkpoint to go on from" in shown
    assert f"resumed from {checkpoint} at step 2" in shown
    assert [line["step"] for line in steps(tmp_path / "more")] == [3]


def test_texts_are_tokenized_as_they_are_read(tmp_path: Path) -> None:
    """Another part of the same set is held out."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for split in ("train", "validation"):
        lines = [json.dumps({"text": f"{split} {number} " * 30}) for number in range(40)]
        (texts / f"{split}.jsonl").write_text("\n".join(lines))
    flags = (f"--training_dir=stream:{texts}", f"--test_dir=stream:{texts}")
    more = ("--tokenizer=bytes", "--shuffle_buffer=4", "--max_steps=3", "--validation_batches=1")
    assert "done: 3 steps" in train(tmp_path / "save", 2, *flags, *more)
    given = (*MODEL, *flags, *more, "--eval_split=train", f"--checkpoint_dir={tmp_path}/other")
    done = run(0, *given, program=ENTRY_POINT)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: test_dir: {texts}/train.jsonl is trained on")


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (
            ("--hf_pretrained_model_name_or_dir=/nope",),
            "hf_pretrained_model_name_or_dir: /nope is not a folder here; fix: give the folder of "
            "a model, "
            "or its name on the hub, owner/model\n",
        ),
        (
            (
                "--finetune=1",
                "--pretrained_model_name",
                "/nope",
                "--finetune_checkpoint_load_dir={}/x",
            ),
            "pretrained_model_name: /nope is not a folder here",
        ),
        (
            ("--hf_pretrained_model_name_or_dir={}",),
            "hf_pretrained_model_name_or_dir: {} has no weights",
        ),
        (
            ("--finetune=1", "--pretrained_model_name={}", "--finetune_checkpoint_load_dir={}"),
            "finetune_checkpoint_load_dir: {} has no weights",
        ),
        (
            ("--finetune=1", "--pretrained_checkpoint_file={}/model.bin", "--model_type=llama_v2"),
            "pretrained_checkpoint_file: {}/model.bin cannot be read",
        ),
        (
            ("--checkpoint_dir", "file://{}/there", "--checkpoint_scratch={}/config.json"),
            "checkpoint_scratch: {}/config.json ",
        ),
        (("--training_dir=stream:{}",), "tokenizer: a stream needs one"),
    ],
)
def test_errors_name_the_flag_that_was_given(
    tmp_path: Path, flags: tuple[str, ...], shown: str
) -> None:
    sizes = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 257}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    (tmp_path / "model.bin").write_bytes(b"no weights")
    (tmp_path / "train.jsonl").write_text('{"text": "a text"}\n')
    given = [flag.format(tmp_path) for flag in flags]
    if not any("training_dir" in flag for flag in flags):
        given += SYNTHETIC
    done = run(0, f"--checkpoint_dir={tmp_path}/save", *given, program=ENTRY_POINT)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith(f"error: {shown.format(tmp_path, tmp_path)}"), done.stderr


@pytest.mark.fsdp2
def test_no_loss_depends_on_how_it_is_spread(tmp_path: Path) -> None:
    """Four processes: ranks that share layers, offloaded activations, and replicated shards."""
    flags = (*SYNTHETIC, "--max_steps=3")
    train(tmp_path / "alone", 0, *flags, "--train_batch_size=4", "--sharding_strategy=no_shard")
    shared = (*flags, "--train_batch_size=2", "--tensor_parallel_degree=2", "--shard_degree=1")
    away = ("--offload_activations=1", "--activation_loading_horizon=1")
    program = ("-m", "tests.training.support.offloaded")
    shown = train(tmp_path / "shared", 4, *shared, *away, program=program)
    copies = [tuple(map(int, one)) for one in re.findall(r"(\d+) sent, (\d+) fetched", shown)]
    assert copies == [(6, 6)] * 4, "of each rank, two blocks' inputs in each of three steps"
    zero2 = "--sharding_strategy=_hybrid_shard_zero2"
    shown = train(tmp_path / "copies", 4, *flags, "--train_batch_size=1", zero2, "--shard_degree=2")
    expected = losses(tmp_path / "alone")
    assert losses(tmp_path / "shared") == pytest.approx(expected, abs=1e-5)
    assert losses(tmp_path / "copies") == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("flag", "shown"),
    [
        ("--shard_degree=3", "shard_degree: 1 ranks cannot be cut into groups of 3"),
        ("--clean_cache=1", "clean_cache: needs a GPU"),
        ("--profile_nsys=1", "profile_nsys: needs a GPU"),
    ],
)
def test_what_this_rank_cannot_have(tmp_path: Path, flag: str, shown: str) -> None:
    given = (*MODEL, *SYNTHETIC, flag, "--max_steps=1", f"--checkpoint_dir={tmp_path}")
    done = run(0, *given, program=ENTRY_POINT)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {shown}")
