"""The Neuron backend: one model whatever the degree; real processes over gloo."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.support.runs import run, steps, write_text
from training.config.config import Config, DataConfig, ModelConfig, ParallelConfig, RunConfig
from training.errors import RequestError
from training.models import Mamba2Config, preset

pytestmark = pytest.mark.processes

STEPS, GLOBAL_BATCH = 5, 4
SIZES = {
    **{"family": "mamba2", "d_model": 64, "n_layer": 2, "vocab_size": 256, "head_dim": 16},
    **{"n_groups": 4, "d_state": 16},
}
SHARED = ("backend=neuron", "zero1=True")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, data: str) -> Path:
    """A run of one process with the default backend."""
    save = tmp_path_factory.mktemp("plain")
    train(save, data, 0)
    return save


def train(save: Path, data: str, ranks: int, *changes: str, degree: int = 1) -> None:
    save.mkdir(exist_ok=True)
    batch = GLOBAL_BATCH * degree // max(ranks, 1)
    config = {
        "model": SIZES,
        "data": {"dataset_path": data, "seq_length": 17, "batch_size": batch},
        "optim": {"learning_rate": 3e-3},
        "schedule": {"name": "constant", "warmup": 0.0},  # independent of num_steps
        "parallel": {"tensor_parallel": degree},
        "run": {"num_steps": STEPS, "checkpoint_interval": 2, "save_ckpt_path": str(save)},
    }
    file = save / "config.yaml"
    file.write_text(json.dumps(config))
    done = run(ranks, "--config", str(file), *changes, program=("-m", "training"))
    assert done.returncode == 0, done.stdout + done.stderr


def same(one: Path, other: Path, within: float = 1e-5) -> None:
    expected, found = steps(one), steps(other)
    assert [line["tokens_seen"] for line in found] == [line["tokens_seen"] for line in expected]
    for what in ("loss", "grad_norm"):
        values = [line[what] for line in expected]
        assert [line[what] for line in found] == pytest.approx(values, abs=within), what


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (1, ()),
        (2, ("n_groups=2", "norm_across_groups=True", "bias=True")),
        (4, ("n_groups=4", "tie_embeddings=False", "conv_bias=False")),
        (2, ("n_groups=2", "bias=True", "layers=recorded")),
    ],
)
def test_logits_and_gradients_are_those_of_the_whole_model(
    ranks: int, sizes: tuple[str, ...]
) -> None:
    done = run(
        ranks, f"degree={ranks}", *sizes, program=("-m", "tests.training.support.neuron_parts")
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.boxes
@pytest.mark.parametrize(
    ("ranks", "degree", "changes"),
    [
        (2, 2, ("backend=neuron",)),
        (4, 2, SHARED),
        (4, 4, ("backend=neuron", "fsdp_activation_checkpointing=True")),
        (2, 1, ("backend=neuron",)),
        (2, 1, (*SHARED, f"global_batch={GLOBAL_BATCH}", "batch_size=1")),
        (4, 2, (*SHARED, f"global_batch={GLOBAL_BATCH}", "batch_size=1")),
    ],
)
def test_losses_are_those_of_one_process(
    tmp_path: Path, data: str, plain: Path, ranks: int, degree: int, changes: tuple[str, ...]
) -> None:
    train(tmp_path, data, ranks, *changes, degree=degree)
    same(plain, tmp_path)


@pytest.mark.boxes
def test_a_run_goes_on_with_any_degree_and_backend(tmp_path: Path, data: str, plain: Path) -> None:
    turns: list[tuple[int, int, tuple[str, ...]]] = [
        (0, 1, ()),
        (4, 4, SHARED),
        (2, 1, SHARED),
        (2, 2, ("backend=neuron",)),
        (0, 1, ()),
    ]
    for step, (ranks, degree, changes) in enumerate(turns, 1):
        train(tmp_path, data, ranks, f"num_steps={step}", *changes, degree=degree)
    same(plain, tmp_path)


@pytest.mark.boxes
def test_bfloat16_with_float32_weights(tmp_path: Path, data: str, plain: Path) -> None:
    train(tmp_path / "one", data, 0, "backend=neuron", "precision=bf16")
    same(plain, tmp_path / "one", within=0.02)
    train(tmp_path / "two", data, 2, *SHARED, "precision=bf16")
    same(tmp_path / "one", tmp_path / "two", within=0.01)


@pytest.mark.parametrize(
    ("sizes", "parallel", "run_", "shown"),
    [
        ({"n_groups": 2}, {"tensor_parallel": 4}, {}, "4 ranks cannot share 2 groups (n_groups)"),
        ({}, {"tensor_parallel": 3}, {}, "3 ranks cannot share 8 heads (d_inner / head_dim)"),
        ({"vocab_size": 254}, {"tensor_parallel": 4}, {}, "254 words of the vocabulary"),
        (
            {},
            {"sharding_strategy": "ddp"},
            {},
            "sharding_strategy: backend=neuron ignores it",
        ),
        (
            {},
            {"master_weights": False},
            {},
            "master_weights: False has no effect without precision=bf16",
        ),
        ({}, {"backend": "fsdp", "zero1": True}, {}, "zero1: backend=fsdp ignores it"),
        ({}, {"backend": "fsdp"}, {"device": "xla"}, "device: xla needs backend=neuron"),
    ],
)
def test_what_does_not_fit_is_refused(
    sizes: dict[str, Any], parallel: dict[str, Any], run_: dict[str, Any], shown: str
) -> None:
    known = {name: value for name, value in SIZES.items() if name != "family"}
    with pytest.raises(RequestError) as error:
        Config(
            model=ModelConfig(name="try", sizes=Mamba2Config(**{**known, **sizes})),
            data=DataConfig(dataset_path="synthetic:"),
            run=RunConfig(save_ckpt_path="x", **run_),
            parallel=ParallelConfig(**{"backend": "neuron", **parallel}),
        )
    assert shown in str(error.value)


def test_other_families_are_refused() -> None:
    with pytest.raises(RequestError, match="backend: neuron has mamba2 only, not llama"):
        Config(
            model=ModelConfig(name="try", sizes=preset("llama-tiny")),
            data=DataConfig(dataset_path="synthetic:"),
            run=RunConfig(save_ckpt_path="x"),
            parallel=ParallelConfig(backend="neuron"),
        )


def test_without_a_device_the_way_out_is_reported(tmp_path: Path, data: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"model": SIZES}))
    settings = (
        "backend=neuron",
        "device=xla",
        f"dataset_path={data}",
        f"save_ckpt_path={tmp_path}",
    )
    done = run(0, "--config", str(config), *settings, program=("-m", "training"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error: device: xla is not available here" in done.stderr and "gloo" in done.stderr
