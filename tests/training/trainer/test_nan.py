"""Losses and gradients that are not finite: reported, traced to their origin, or left out."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.support.runs import ROOT, TINY, run, steps, write_text
from training.errors import TrainingError
from training.trainer.step import check_gradients

pytestmark = pytest.mark.processes

EXPLODING = "--learning_rate=1e30"


@pytest.fixture
def given(tmp_path: Path) -> tuple[str, ...]:
    data = write_text(tmp_path / "text")
    return (*TINY, f"--dataset_path={data}", f"--save_ckpt_path={tmp_path}", "--num_steps=20")


def test_the_run_stops_and_says_how_to_find_out_more(given: tuple[str, ...]) -> None:
    done = run(0, *given, EXPLODING)
    assert done.returncode == 1
    assert "error: step 2: loss is " in done.stderr and "trace_nan=True" in done.stderr


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_trace_names_the_module_the_step_and_the_samples(
    given: tuple[str, ...], ranks: int
) -> None:
    done = run(ranks, *given, EXPLODING, "--trace_nan=True")
    assert done.returncode == 1
    each = 2 * max(1, ranks)
    shown = f"step 2, samples {each} to {2 * each - 1} of the order: "
    assert shown in done.stderr
    line = done.stderr[done.stderr.index(shown) :].splitlines()[0]
    assert "backbone." in line and " NaN and " in line


def test_too_many_steps_that_are_left_out_end_the_run(given: tuple[str, ...]) -> None:
    done = run(0, *given, EXPLODING, "--on_nan=skip")
    assert done.returncode == 1
    assert "error: 10 steps in a row were left out" in done.stderr
    assert done.stdout.count("the step is left out") == 10


BROKEN_ONCE = """
import sys
from training import mamba_fsdp
from training.parallel import fsdp
from training.entrypoint import enter, leave
clip = fsdp.clip_gradients
norms = iter(range(100))

def broken_once(model, threshold):
    norm = clip(model, threshold)
    return norm * float("nan") if next(norms) == 2 else norm

fsdp.clip_gradients = broken_once
leave(enter(mamba_fsdp.configure, sys.argv[1:]))
"""


def broken_once(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run training whose third gradient is not finite."""
    argv = [sys.executable, "-c", BROKEN_ONCE, *flags]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the records of a kind; every line must be JSON, which has no NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=refuse) for line in lines]
    return [one for one in found if one["kind"] == kind]


@pytest.mark.parametrize("more", [(), ("--eval_interval=5",)])
def test_the_steps_before_the_one_that_stops_the_run_are_recorded(
    given: tuple[str, ...], tmp_path: Path, more: tuple[str, ...]
) -> None:
    """No evaluation of the weights after it is recorded."""
    held_out = f"--eval_dataset_path={write_text(tmp_path / 'held')}"
    done = broken_once(*given, held_out, "--report_interval=20", *more)
    assert done.returncode == 1 and "error: step 3: grad_norm is nan" in done.stderr
    assert [line["step"] for line in records(tmp_path, "step")] == [1, 2]
    assert not records(tmp_path, "evaluation")


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_an_evaluation_that_gives_no_number(
    given: tuple[str, ...], tmp_path: Path, on_nan: str
) -> None:
    """The first step breaks the weights, but its own loss and gradient are finite."""
    held_out = f"--eval_dataset_path={write_text(tmp_path / 'held')}"
    done = run(0, *given, EXPLODING, held_out, "--eval_interval=1", f"--on_nan={on_nan}")
    assert done.returncode == 1
    assert records(tmp_path, "step")[0]["step"] == 1
    evaluations = records(tmp_path, "evaluation")
    if on_nan == "stop":
        assert "error: step 1: evaluation loss is nan; the run stops here" in done.stderr
        assert not evaluations and not list((tmp_path / "checkpoints").glob("step_*_ckp"))
    else:
        assert "error: 10 steps in a row were left out" in done.stderr
        assert {(one["loss"], one["perplexity"]) for one in evaluations} == {(None, None)}
        assert "tokens | loss - | perplexity -" in done.stdout


def test_a_step_that_is_left_out_is_reported_and_the_run_goes_on(
    given: tuple[str, ...], tmp_path: Path
) -> None:
    done = broken_once(*given, "--on_nan=skip", "--report_interval=3")
    assert done.returncode == 0, done.stderr
    assert "step 3: the gradient norm is nan, the step is left out" in done.stdout
    lines = steps(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert [line["step"] for line in lines if line.get("skipped")] == [3]
    assert lines[2]["loss"] is None and lines[2]["grad_norm"] is None
    assert lines[-1]["loss"] < lines[0]["loss"]
    reports = records(tmp_path, "report")
    assert not any("skipped" in line for line in reports)
    assert reports[0]["loss"] == pytest.approx((lines[0]["loss"] + lines[1]["loss"]) / 2)


LOSS_BROKEN_ONCE = """
import os
import sys
from torch.optim.optimizer import register_optimizer_step_post_hook
from training import mamba_fsdp
from training.trainer import step
from training.entrypoint import enter, leave
loss_of = step.loss_of
losses = iter(range(100))

def broken_once(*given):
    is_broken = next(losses) == 2 and os.environ["RANK"] == "1"
    return loss_of(*given) + (float("inf") if is_broken else 0.0)

step.loss_of = broken_once
register_optimizer_step_post_hook(lambda *given: print("weights were updated", flush=True))
leave(enter(mamba_fsdp.configure, sys.argv[1:]))
"""


def test_a_step_whose_loss_alone_is_infinite_is_left_out_on_all_ranks(
    given: tuple[str, ...], tmp_path: Path
) -> None:
    """As that of a target far less likely than another: its gradient is finite all the same."""
    program = tmp_path / "broken.py"
    program.write_text(LOSS_BROKEN_ONCE)
    flags = (*given, "--num_steps=5", "--on_nan=skip")
    done = run(2, *flags, program=[str(program)])
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in steps(tmp_path) if line.get("skipped")] == [3]
    assert done.stdout.count("weights were updated") == 4 * 2
    assert "step 3: the loss is inf, the step is left out" in done.stdout


def test_a_gradient_that_was_widened_is_looked_at() -> None:
    """The Neuron backend's optimizer widens gradients in bfloat16."""
    layer = torch.nn.Linear(2, 2, bias=False)
    layer.weight.main_grad = torch.full((2, 2), torch.nan)  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match="the gradient of weight has 4 NaN"):
        check_gradients(layer, lambda: "step 1")
