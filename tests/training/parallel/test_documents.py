"""Separate documents on ranks that share a model: as if alone; and runs that resume exactly."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.training.support.documents_spread import cases
from tests.training.support.runs import losses, run, steps
from training.data.packed import PackedWriter

pytestmark = pytest.mark.processes

STEPS, GLOBAL_BATCH, LENGTH = 4, 4, 48


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Packed documents of 1 to 30 tokens."""
    file = tmp_path_factory.mktemp("packed") / "short.npy"
    with PackedWriter(file) as writer:
        for at in range(900):
            writer.write([(7 * at + 3 * i * i) % 250 for i in range(1 + (11 * at) % 30)])
    return f"packed:{file}"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_logits_and_gradients_are_those_of_each_document_alone(ranks: int) -> None:
    """Each family under FSDP1 and FSDP2, recomputed, tensor parallel, and on the Neuron backend."""
    done = run(ranks, program=("-m", "tests.training.support.documents_spread"), timeout=600)
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines() if ": " in line] == [
        name for name, _, _ in cases(ranks)
    ]


def train(save: Path, data: str, ranks: int, *changes: str, name: str = "mamba2-tiny") -> None:
    save.mkdir(exist_ok=True)
    file = save / "config.yaml"
    file.write_text(f"model: {{name: {name}}}\nschedule: {{name: constant, warmup: 0.0}}\n")
    settings = (
        f"dataset_path={data}",
        f"save_ckpt_path={save}",
        f"seq_length={LENGTH}",
        f"batch_size={GLOBAL_BATCH // max(1, ranks)}",
        f"num_steps={STEPS}",
        "checkpoint_interval=2",
        "learning_rate=3e-3",
        *changes,
    )
    done = run(ranks, "--config", str(file), *settings, program=("-m", "training"))
    assert done.returncode == 0, done.stdout + done.stderr
    said = "reset_documents: state and attention begin anew" in done.stdout
    assert said == ("reset_documents=False" not in changes)


@pytest.mark.parametrize("name", ["mamba-tiny", "mamba2-tiny", "llama-tiny"])
def test_it_is_on_where_the_data_knows_and_depends_on_no_layout(
    tmp_path: Path, data: str, name: str
) -> None:
    train(tmp_path / "alone", data, 0, name=name)
    train(tmp_path / "off", data, 0, "reset_documents=False", name=name)
    alone, off = losses(tmp_path / "alone"), losses(tmp_path / "off")
    assert all(abs(one - other) > 1e-4 for one, other in zip(alone, off, strict=True))
    layouts = (
        (2, ("fsdp_activation_checkpointing=True", "num_workers=2")),
        (2, ("fsdp_engine=fsdp1", "batch_size=1", "gradient_accumulation=2")),
    )
    for number, (ranks, changes) in enumerate(layouts):
        train(tmp_path / str(number), data, ranks, *changes, name=name)
        assert losses(tmp_path / str(number)) == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("name", ["mamba-tiny", "mamba2-tiny", "llama-tiny"])
def test_a_run_that_resumes_has_the_losses_of_one_that_did_not_stop(
    tmp_path: Path, data: str, name: str
) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    train(whole, data, 2, name=name)
    kept = "checkpoints/step_2_ckp"
    shutil.copytree(whole / kept, again / kept)
    train(again, data, 2, name=name)
    assert steps(again) == steps(whole)[2:]


def test_compiled_blocks_give_the_same_losses(tmp_path: Path, data: str) -> None:
    for name in ("mamba2-tiny", "llama-tiny"):
        plain, compiled = tmp_path / f"{name}-plain", tmp_path / f"{name}-compiled"
        train(plain, data, 0, "num_steps=2", name=name)
        train(compiled, data, 0, "num_steps=2", "use_torch_compile=True", name=name)
        assert losses(compiled) == pytest.approx(losses(plain), abs=1e-4)
