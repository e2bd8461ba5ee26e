"""Sequences that ranks share: one model, whatever the degree; real processes over gloo."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.training.support.context_spread import cases
from tests.training.support.runs import run, steps
from training.config import degrees
from training.config.yaml import load
from training.data.packed import PackedWriter
from training.errors import RequestError
from training.models import Mamba2Config, NeoXConfig

STEPS, GLOBAL_BATCH, LENGTH = 4, 4, 47
processes = pytest.mark.processes
RECOMPUTED = ("low_cpu_fsdp=True", "fsdp_activation_checkpointing=True")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Packed documents of 1 to 90 tokens: some span four pieces, some lie in one."""
    file = tmp_path_factory.mktemp("packed") / "short.npy"
    with PackedWriter(file) as writer:
        for at in range(500):
            writer.write([(7 * at + 3 * i * i) % 250 for i in range(1 + (11 * at) % 90)])
    return f"packed:{file}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, data: str) -> Any:
    """Return folders of runs on one process, with a checkpoint every two steps, each made once."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("alone")
            train(made[name], data, 0, 1, name)
        return made[name]

    return find


def train(save: Path, data: str, ranks: int, degree: int, name: str, *changes: str) -> None:
    """Train with `degree` ranks per sequence, with `python -m training --config`."""
    save.mkdir(exist_ok=True)
    file = save / "config.yaml"
    balance = "balance_coefficient: 0.1" if name == "mixtral-tiny" else ""
    file.write_text(
        f"model: {{name: {name}, {balance}}}\nschedule: {{name: constant, warmup: 0.0}}\n"
    )
    shared = max([1, *(int(one[16:]) for one in changes if one.startswith("tensor_parallel="))])
    settings = (
        f"dataset_path={data}",
        f"save_ckpt_path={save}",
        f"seq_length={LENGTH}",
        f"batch_size={GLOBAL_BATCH * degree * shared // max(1, ranks)}",
        f"num_steps={STEPS}",
        f"context_parallel={degree}",
        "checkpoint_interval=2",
        "learning_rate=3e-3",
        *changes,
    )
    done = run(ranks, "--config", str(file), *settings, program=("-m", "training"))
    assert done.returncode == 0, done.stdout + done.stderr


def same(one: Path, other: Path, first: int = 0) -> None:
    """Check that both have the same losses and gradient norms after the first steps."""
    expected, found = steps(one)[first:], steps(other)
    assert [line["tokens_seen"] for line in found] == [line["tokens_seen"] for line in expected]
    for what, within in (("loss", 1e-5), ("grad_norm", 5e-5)):
        values = [line[what] for line in expected]
        assert [line[what] for line in found] == pytest.approx(values, abs=within), what


@processes
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_logits_and_gradients_are_those_of_one_rank(ranks: int) -> None:
    """Each family: with and without documents, both engines, recomputed, and tensor parallel."""
    done = run(ranks, program=("-m", "tests.training.support.context_spread"), timeout=600)
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines() if ": " in line] == [
        f"{name} {kind}" for name, _, _ in cases(ranks) for kind in ("documents", "whole")
    ]


@processes
@pytest.mark.parametrize(
    ("name", "ranks", "degree", "changes"),
    [
        ("mamba-tiny", 2, 2, ()),
        ("mamba-tiny", 4, 4, RECOMPUTED),
        ("mamba2-tiny", 4, 4, ()),
        ("mamba2-tiny", 4, 2, ("sharding_strategy=hsdp", "shard_group_size=2")),
        ("llama-tiny", 4, 4, RECOMPUTED),
        ("llama-tiny", 2, 2, ("batch_size=2", "gradient_accumulation=2", "num_workers=1")),
        ("mixtral-tiny", 2, 2, ()),
        ("bamba-tiny", 4, 2, RECOMPUTED),
    ],
)
def test_the_degree_changes_no_loss(
    tmp_path: Path, data: str, alone: Any, name: str, ranks: int, degree: int, changes: Any
) -> None:
    train(tmp_path, data, ranks, degree, name, *changes)
    same(alone(name), tmp_path)


@processes
@pytest.mark.fsdp2
@pytest.mark.parametrize("name", ["llama-tiny", "mamba2-tiny"])
def test_it_goes_with_tensor_parallelism(tmp_path: Path, data: str, alone: Any, name: str) -> None:
    train(tmp_path, data, 4, 2, name, "tensor_parallel=2")
    same(alone(name), tmp_path)


@processes
@pytest.mark.parametrize("name", ["llama-tiny", "mamba-tiny", "mamba2-tiny"])
def test_a_checkpoint_goes_on_with_another_degree(
    tmp_path: Path, data: str, alone: Any, name: str
) -> None:
    """From two ranks per sequence to one, four and two: with two, bit for bit."""
    two = tmp_path / "two"
    train(two, data, 2, 2, name)
    kept = "checkpoints/step_2_ckp"
    for source, ranks, degree in ((two, 0, 1), (two, 2, 2), (alone(name), 4, 4)):
        save = tmp_path / f"again-{degree}"
        shutil.copytree(source / kept, save / kept)
        train(save, data, ranks, degree, name)
        same(alone(name), save, first=2)
        if degree == 2:
            assert steps(save) == steps(two)[2:]


@processes
def test_a_stream_goes_on_with_another_degree(tmp_path: Path) -> None:
    """Texts are tokenized as they are read, so only the ranks that read know the position."""
    texts = tmp_path / "texts"
    texts.mkdir()
    lines = [json.dumps({"text": f"text {at} " * (1 + at * 7 % 19)}) for at in range(200)]
    (texts / "some.jsonl").write_text("\n".join(lines))
    how = ("tokenizer=bytes", "shuffle_buffer=10")
    one, two, four = (tmp_path / name for name in ("one", "two", "four"))
    train(one, f"stream:{texts}", 0, 1, "mamba2-tiny", *how)
    train(two, f"stream:{texts}", 2, 2, "mamba2-tiny", *how)
    same(one, two)
    kept = "checkpoints/step_2_ckp"
    shutil.copytree(two / kept, four / kept)
    train(four, f"stream:{texts}", 4, 2, "mamba2-tiny", *how)
    same(one, four, first=2)


@processes
@pytest.mark.parametrize("name", ["llama-tiny", "mamba-tiny", "mamba2-tiny"])
def test_blocks_compute_in_bfloat16(tmp_path: Path, data: str, name: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for save, ranks, degree in ((one, 0, 1), (two, 2, 2)):
        train(save, data, ranks, degree, name, "precision=bf16", "num_steps=2")
    expected = [line["loss"] for line in steps(one)]
    assert [line["loss"] for line in steps(two)] == pytest.approx(expected, abs=2e-2)


@processes
def test_an_evaluation_counts_each_token_once(tmp_path: Path, data: str) -> None:
    held_out = shutil.copytree(Path(data.removeprefix("packed:")).parent, tmp_path / "held")
    changes = (f"eval_dataset_path=packed:{held_out}/*.npy", "eval_batches=2", "num_steps=1")
    found = []
    for name, ranks in (("one", 0), ("two", 2)):
        train(tmp_path / name, data, ranks, max(1, ranks), "mamba2-tiny", *changes)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found += [json.loads(line) for line in lines if '"evaluation"' in line]
    one, two = found
    assert two["tokens"] == one["tokens"]
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "shown"),
    [
        ("mamba-tiny", ("seq_length=11", "context_parallel=4"), "pieces of 2 tokens (seq_length"),
        ("llama-tiny", ("seq_length=3", "context_parallel=4"), "each needs 1; fix: make"),
        ("llama-tiny", ("context_parallel=2", "use_torch_compile=True"), "cannot be compiled"),
        ("mamba2-tiny", ("context_parallel=2", "backend=neuron"), "ignores it"),
        ("llama-tiny", ("context_parallel=2", "backend=smp"), "ignores it"),
        ("llama-tiny", ("context_parallel=0",), "must be"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, name: str, changes: tuple[str, ...], shown: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"model: {{name: {name}}}\n")
    given = ("dataset_path=synthetic:", "save_ckpt_path=/nowhere", *changes)
    with pytest.raises(RequestError) as caught:
        load(file, given)
    assert "context_parallel: " in str(caught.value) and shown in str(caught.value)


def test_attention_with_dropout_is_refused() -> None:
    sizes = NeoXConfig(d_model=32, n_layer=1, vocab_size=61, n_head=4, d_ff=64)
    assert degrees.context_faults(sizes, 2, 64, compiled=False) == []
    dropping = replace(sizes, attention_dropout=0.1)
    (fault,) = degrees.context_faults(dropping, 2, 64, compiled=False)
    assert "attention over several ranks has no dropout" in fault


def test_ranks_that_are_no_whole_groups_are_refused() -> None:
    assert degrees.world_faults(1, 3, has_fsdp2=True, context=2) == [
        "context_parallel: 3 ranks cannot be cut into groups of 2"
    ]
    assert degrees.world_faults(2, 6, has_fsdp2=True, context=2) == [
        "context_parallel: 3 tensor groups cannot be cut into groups of 2"
    ]
    assert degrees.world_faults(2, 8, has_fsdp2=True, context=2) == []
    sizes = Mamba2Config(d_model=32, n_layer=1, vocab_size=61, head_dim=16)
    assert degrees.context_faults(sizes, 4, 12, compiled=False) == []
