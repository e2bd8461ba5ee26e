"""Training from given weights: it starts at their loss, and an invalid folder is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.training.support.checkpoints import write_checkpoint
from tests.training.support.runs import ENGINES, TINY, losses, run, train, write_text
from training.checkpoint.initial_weights import open_weights
from training.config.config import ModelConfig
from training.convert.__main__ import convert
from training.convert.source import Source, load
from training.data.sources import open_feed
from training.errors import RequestError
from training.mamba_fsdp import configure
from training.models import build, preset

pytestmark = pytest.mark.processes

STEPS, GLOBAL_BATCH = 6, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data: str) -> Any:
    """A run of six steps, with a checkpoint after the third."""
    save = tmp_path_factory.mktemp("trained")
    train(save, data, 0, GLOBAL_BATCH, STEPS, "--checkpoint_interval=3")
    return save


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Any:
    """The model after three steps."""
    folder = tmp_path_factory.mktemp("converted") / "weights"
    source = trained / "checkpoints" / "step_3_ckp"
    convert(["--from", "ours", str(source), "--to", "ours", str(folder)])
    return folder


@pytest.fixture(scope="module")
def expected(data: str, weights: Path) -> Any:
    """The loss on the first batch of the model that training starts from."""
    flags = ("--save_ckpt_path=out", f"--dataset_path={data}", f"--batch_size={GLOBAL_BATCH}")
    feed = open_feed(configure((*TINY, *flags)), 0, 1)
    batch = feed.next_rows(range(GLOBAL_BATCH)).rows
    model = load(Source.open("ours", weights), torch.device("cpu"), torch.float32)
    return model(batch.inputs, batch.targets).item()


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(("engine", "ranks"), [("auto", 0), *((one, 2) for one in ENGINES)])
def test_the_first_loss_is_that_of_the_model_it_starts_from(
    tmp_path: Path,
    data: str,
    trained: Path,
    weights: Path,
    expected: float,
    engine: str,
    ranks: int,
    low: bool,
) -> None:
    flags = (f"--init_weights={weights}", f"--fsdp_engine={engine}", f"--low_cpu_fsdp={low}")
    started = train(tmp_path, data, ranks, GLOBAL_BATCH // max(1, ranks), 2, *flags)
    assert started[0] == pytest.approx(expected, abs=1e-5)
    assert started[0] < losses(trained)[0] - 0.5


def test_bfloat16_weights_become_float32(tmp_path: Path, data: str, weights: Path) -> None:
    half = tmp_path / "half"
    convert(["--from", "ours", str(weights), "--to", "ours", str(half), "--dtype", "bfloat16"])
    found = [
        train(tmp_path / name, data, 0, GLOBAL_BATCH, 2, f"--init_weights={folder}", low)
        for name, folder, low in (
            ("whole", weights, "--low_cpu_fsdp=False"),
            ("rounded", half, "--low_cpu_fsdp=False"),
            ("sharded", half, "--low_cpu_fsdp=True"),
        )
    ]
    assert found[1] == found[2] != found[0]
    assert found[1] == pytest.approx(found[0], abs=0.01)
    done = tmp_path / "again"
    checkpoint = tmp_path / "rounded" / "checkpoints" / "step_2_ckp"
    convert(["--from", "ours", str(checkpoint), "--to", "ours", str(done)])
    assert {str(one.dtype) for one in load_file(done / "model.safetensors").values()} == {
        "torch.float32"
    }


TELLING_WHAT_IS_READ = """
import sys
from training import mamba_fsdp, manifest
from training.entrypoint import enter, leave
rotten = manifest.rotten

def noted(path, *given):
    print(f"reads {path.name} whole", flush=True)
    return rotten(path, *given)

manifest.rotten = noted
leave(enter(mamba_fsdp.configure, sys.argv[1:]))
"""


def test_a_checkpoint_comes_first_and_that_is_reported(
    tmp_path: Path, data: str, trained: Path, weights: Path
) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / f"step_{STEPS}_ckp")
    program = tmp_path / "program.py"
    program.write_text(TELLING_WHAT_IS_READ)
    done = run(
        0,
        *TINY,
        f"--dataset_path={data}",
        f"--save_ckpt_path={tmp_path}",
        f"--batch_size={GLOBAL_BATCH}",
        f"--num_steps={STEPS}",
        f"--init_weights={weights}",
        program=(str(program),),
    )
    assert done.returncode == 0, done.stderr
    assert "init_weights: not read, as there is a checkpoint to go on from" in done.stdout
    assert done.stdout.count("reads step_3_ckp whole") == 1
    assert losses(tmp_path) == losses(trained)


def broken(weights: Path, folder: Path, what: str) -> Path:
    """Copy a folder of weights, and damage one thing in it."""
    shutil.copytree(weights, folder)
    config, file = folder / "config.json", folder / "model.safetensors"
    if what == "sizes":
        settings = json.loads(config.read_text())
        settings["sizes"] |= {"norm_eps": 1e-6, "d_state": 16, "residual_in_fp32": False}
        config.write_text(json.dumps(settings))
        return folder
    tensors = load_file(file)
    if what == "shape":
        tensors["backbone.norm_f.weight"] = tensors["backbone.norm_f.weight"][:-1].clone()
    else:
        tensors["backbone.extra"] = tensors.pop("backbone.norm_f.weight")
    file.unlink()
    save_file(tensors, file)
    return folder


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        (
            "sizes",
            [
                "is of another model than mamba-tiny:",
                "norm_eps: 1e-06 there, 1e-05 asked for",
                "residual_in_fp32: False there, True asked for",
            ],
        ),
        ("shape", ["backbone.norm_f.weight has shape (127,), wanted (128,)"]),
        (
            "names",
            ["backbone.norm_f.weight is missing, wanted (128,)", "backbone.extra is not expected"],
        ),
        ("family", ["family: mamba there, llama asked for"]),
        ("nothing", ["init_weights: /nowhere is not a folder"]),
    ],
)
def test_other_weights_are_refused(
    tmp_path: Path, weights: Path, what: str, shown: list[str]
) -> None:
    folder, name = weights, "llama-tiny"
    if what == "nothing":
        folder = Path("/nowhere")
    elif what != "family":
        folder, name = broken(weights, tmp_path / "broken", what), "mamba-tiny"
    with pytest.raises(RequestError) as error:
        open_weights(ModelConfig(name=name, sizes=preset(name), init_weights=str(folder)))
    assert str(error.value).startswith("init_weights: ")
    for line in shown:
        assert line in str(error.value)


WRITTEN_OUT: dict[str, dict[str, Any]] = {
    "mamba-tiny": {"dt_rank": 8},
    "mamba2-tiny": {"norm_across_groups": True},
    "llama-tiny": {"head_dim": 32},
    "granitemoehybrid-tiny": {"head_dim": 32, "attention_multiplier": 1 / 32},
    "nemotron_h-tiny": {"head_dim": 32},
}
"""Sizes that are derived anyway, but that a file or a preset may write out."""


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_a_size_that_is_written_out_is_the_one_that_follows(name: str, tmp_path: Path) -> None:
    """For example head_dim in nemotron-h-8b, which is read from Hugging Face's file without it."""
    sizes = preset(name)
    run_folder, given = tmp_path / "run", WRITTEN_OUT[name]
    write_checkpoint(build(sizes), run_folder)
    convert(["--from", "ours", str(run_folder), "--to", "hf", f"{tmp_path}/hf"])
    same = ModelConfig(name=name, sizes=replace(sizes, **given), init_weights=f"{tmp_path}/hf")
    assert open_weights(same).sizes.family == sizes.family
    for name, value in given.items():
        if name not in ("norm_across_groups", "attention_multiplier"):
            other = replace(sizes, **{**given, name: 2 * value})
            with pytest.raises(RequestError, match=f"{name}: {value} there, {2 * value} asked for"):
                open_weights(replace(same, sizes=other))


def test_a_refused_run_has_not_trained(tmp_path: Path, data: str, weights: Path) -> None:
    folder = broken(weights, tmp_path / "broken", "shape")
    given = (f"--dataset_path={data}", f"--save_ckpt_path={tmp_path}/run", "--num_steps=2")
    done = run(0, *TINY, *given, f"--init_weights={folder}")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: init_weights: ")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
