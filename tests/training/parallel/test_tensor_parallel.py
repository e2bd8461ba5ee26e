"""Layers that ranks share: one model, whatever the degree; real processes over gloo."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.training.support import runs
from tests.training.support.runs import TINY, run, steps, train, write_text
from training.config import degrees
from training.errors import RequestError
from training.mamba_fsdp import configure

pytestmark = [pytest.mark.processes, pytest.mark.fsdp2]

STEPS, GLOBAL_BATCH = 4, 4
MEMORY = ("--low_cpu_fsdp=True", "--fsdp_activation_checkpointing=True")
GROUPS = {"family": "mamba2", "d_model": 64, "n_layer": 2, "vocab_size": 256, "head_dim": 16}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, data: str) -> Any:
    """Return folders of runs on one process, with a checkpoint every two steps, each made once."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("alone")
            flags = (f"--model_name={name}", "--checkpoint_interval=2")
            train(made[name], data, 0, GLOBAL_BATCH, STEPS, *flags)
        return made[name]

    return find


def shared(save: Path, data: str, name: str, ranks: int, degree: int, *flags: str) -> None:
    """Train with `degree` ranks per layer."""
    asked = (f"--model_name={name}", f"--tensor_parallel={degree}", "--checkpoint_interval=2")
    train(save, data, ranks, GLOBAL_BATCH * degree // ranks, STEPS, *asked, *flags)


def same(one: Path, other: Path, first: int = 0) -> None:
    """Check that both have the same losses and gradient norms after the first steps."""
    expected, found = steps(one)[first:], steps(other)
    assert [line["tokens_seen"] for line in found] == [line["tokens_seen"] for line in expected]
    for what, within in (("loss", 1e-5), ("grad_norm", 5e-5)):
        values = [line[what] for line in expected]
        assert [line[what] for line in found] == pytest.approx(values, abs=within), what


@pytest.mark.parametrize(
    ("name", "ranks", "degree", "flags"),
    [
        ("llama-tiny", 4, 2, MEMORY),
        ("llama-tiny", 4, 2, ("--sharding_strategy=hsdp", "--shard_group_size=2")),
        ("mixtral-tiny", 4, 2, MEMORY),
        ("mamba2-tiny", 4, 4, ()),
        ("mamba2-tiny", 4, 2, MEMORY),
        ("bamba-tiny", 2, 2, ()),
        ("granitemoehybrid-tiny", 4, 2, MEMORY),
        ("nemotron_h-tiny", 2, 2, MEMORY),
    ],
)
def test_the_degree_changes_nothing(
    tmp_path: Path, data: str, alone: Any, name: str, ranks: int, degree: int, flags: Any
) -> None:
    shared(tmp_path, data, name, ranks, degree, *flags)
    same(alone(name), tmp_path)


@pytest.mark.parametrize(
    ("ranks", "degree", "sizes"),
    [
        (4, 4, {**GROUPS, "n_groups": 2, "bias": True}),  # two ranks per group and norm
        (2, 2, {**GROUPS, "n_groups": 4, "norm_across_groups": True}),
        (2, 2, {**GROUPS, "n_groups": 2, "conv_bias": False}),  # one group per rank
        # Biases, and parts that differ by one row.
        (
            4,
            2,
            {
                "family": "llama",
                "d_model": 64,
                "n_layer": 2,
                "vocab_size": 256,
                "n_head": 4,
                "n_kv_head": 2,
                "head_dim": 18,
                "d_ff": 70,
                "attention_bias": True,
                "mlp_bias": True,
            },
        ),
    ],
    ids=["ranks share a group", "norm of all", "own groups", "biases"],
)
def test_other_sizes(
    tmp_path: Path,
    data: str,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    degree: int,
    sizes: dict[str, Any],
) -> None:
    monkeypatch.setattr(runs, "ENTRY_POINT", ("-m", "tests.training.support.sized"))
    monkeypatch.setenv("SIZED", json.dumps(sizes))
    train(tmp_path / "alone", data, 0, GLOBAL_BATCH, STEPS, "--model_name=sized")
    shared(tmp_path / "shared", data, "sized", ranks, degree)
    same(tmp_path / "alone", tmp_path / "shared")


@pytest.mark.parametrize("name", ["llama-tiny", "mamba2-tiny"])
def test_a_checkpoint_goes_on_with_another_degree(
    tmp_path: Path, data: str, alone: Any, name: str
) -> None:
    """From two ranks per layer to one, and back, including the optimizer."""
    one, two = tmp_path / "one", tmp_path / "two"
    shared(tmp_path, data, name, 2, 2)
    same(alone(name), tmp_path)
    for source, save in ((tmp_path, one), (alone(name), two)):
        kept = "checkpoints/step_2_ckp"
        shutil.copytree(source / kept, save / kept)
    train(one, data, 0, GLOBAL_BATCH, STEPS, f"--model_name={name}")
    shared(two, data, name, 2, 2, "--low_cpu_fsdp=True")
    same(alone(name), one, first=2)
    same(alone(name), two, first=2)


def test_an_evaluation_counts_each_token_once(tmp_path: Path, data: str) -> None:
    held_out = write_text(tmp_path / "held")
    flags = (f"--eval_dataset_path={held_out}", "--eval_batches=2", "--model_name=llama-tiny")
    train(tmp_path / "one", data, 0, GLOBAL_BATCH, 1, *flags)
    train(tmp_path / "two", data, 2, GLOBAL_BATCH, 1, *flags, "--tensor_parallel=2")
    one, two = (
        json.loads(line)
        for name in ("one", "two")
        for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        if '"evaluation"' in line
    )
    assert two["tokens"] == one["tokens"] == 2 * GLOBAL_BATCH * 17
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (
            ("--model_name=llama-tiny", "--tensor_parallel=4"),
            ["4 ranks cannot share 2 heads of keys and values (n_kv_head) evenly"],
        ),
        (
            ("--model_name=llama-tiny", "--tensor_parallel=3", "--fsdp_engine=fsdp1"),
            ["4 heads of queries (n_head)", "2 heads of keys", "352 channels", "FSDP2 only"],
        ),
        (
            ("--model_name=mamba2-7b", "--tensor_parallel=12"),
            ["64 heads (d_inner / head_dim)", "4096 columns", "multiple of 12 groups"],
        ),
        (
            ("--model_name=mamba-tiny", "--tensor_parallel=2"),
            ["cannot share a layer of mamba, only those of"],
        ),
        (
            ("--model_name=granite-4.0-h-tiny", "--tensor_parallel=5"),
            [
                *("48 heads of Mamba-2 (n_mamba_head)", "1536 columns", "12 heads of queries"),
                *("4 heads of keys", "1024 channels of the MLP", "512 channels of an expert"),
            ],
        ),
        (
            ("--model_name=nemotron_h-tiny", "--tensor_parallel=3"),
            [
                *("8 heads of Mamba-2", "128 columns", "4 heads of queries", "2 heads of keys"),
                *("352 channels of the MLP", "a multiple of 3 groups"),
            ],
        ),
        (
            ("--model_name=llama-tiny", "--tensor_parallel=2", "--use_torch_compile=True"),
            ["cannot be compiled"],
        ),
    ],
)
def test_a_degree_that_does_not_fit_the_model_is_refused(flags: Any, shown: list[str]) -> None:
    given = ("--dataset_path=synthetic:", "--save_ckpt_path=/nowhere", *flags)
    with pytest.raises(RequestError) as caught:
        configure(given)
    assert all(part in str(caught.value) for part in shown)
    assert str(caught.value).count("tensor_parallel: ") == len(shown)


def test_ranks_that_are_no_whole_groups_are_refused(tmp_path: Path, data: str) -> None:
    given = (f"--dataset_path={data}", f"--save_ckpt_path={tmp_path}", "--num_steps=2")
    done = run(3, *TINY, *given, "--model_name=llama-tiny", "--tensor_parallel=2")
    shown = done.stderr.partition("torch.distributed.elastic")[0]
    assert "error: tensor_parallel: 3 ranks cannot be cut into groups of 2" in shown
    assert shown.count("error: ") == 1 and not list(tmp_path.iterdir())
    found = degrees.world_faults(2, 3, has_fsdp2=False)
    assert len(found) == 2 and "this torch does not have" in found[1]


def test_groups_that_span_nodes_are_reported() -> None:
    assert degrees.warnings(8, 8) == degrees.warnings(1, 3) == []
    assert "groups of 16 ranks span nodes, which have 8" in degrees.warnings(16, 8)[0]
