"""Which implementation runs: the first that can, or the forced one."""

import importlib
import logging
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.training.support.runs import TINY, run, write_text
from training import ops
from training.errors import RequestError
from training.ops import scan, ssd
from training.ops.dispatch import NAMES, VARIABLE, Choice, Implementation, on_gpu

X = torch.ones(2)


def made() -> Choice:
    def nowhere(like: Tensor) -> str:
        return "it is the wrong day"

    return Choice(
        "rms_norm",
        [
            Implementation(name="unfit", run=lambda: "unfit", unfit=nowhere),
            Implementation(name="absent", run=lambda: "absent", module="no_such_module"),
            Implementation(name="first", run=lambda: "first"),
            Implementation(name="second", run=lambda: "second"),
        ],
    )


def test_the_first_that_can_runs_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    choice = made()
    with caplog.at_level(logging.INFO, "training.ops"):
        assert [choice(X)(), choice(X)()] == ["first", "first"]
    assert [record.message for record in caplog.records] == [
        "rms_norm: first on cpu, torch.float32"
    ]


def test_another_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = made()
    assert choice(X)() == "first"
    monkeypatch.setenv(VARIABLE, "attention=torch, rms_norm = second")
    assert choice(X)() == "second"


@pytest.mark.parametrize(
    ("forced", "says"),
    [
        ("rms_norm=unfit", "rms_norm=unfit cannot run: it is the wrong day"),
        ("rms_norm=absent", "cannot run: no_such_module cannot be imported"),
        ("rms_norm=fast", r"rms_norm has no 'fast' \(there is unfit, absent, first, second\)"),
        ("norm=first", "'norm=first' is not OPERATION=WAY"),
        ("rms_norm", "'rms_norm' is not OPERATION=WAY"),
    ],
)
def test_what_cannot_be_forced_is_reported(
    forced: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, forced)
    with pytest.raises(RequestError, match=says):
        made()(X)


def test_every_operation_that_can_be_forced_is_one() -> None:
    found = set()
    for one in pkgutil.iter_modules(ops.__path__):
        module = importlib.import_module(f"{ops.__name__}.{one.name}")
        found |= {value.name for value in vars(module).values() if isinstance(value, Choice)}
    assert found == set(NAMES)


def test_a_kernel_for_gpus_is_not_taken_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_gpu(X) == "it needs a GPU, but the tensors are on cpu"
    monkeypatch.setenv(VARIABLE, "selective_scan=mamba-ssm")
    with pytest.raises(RequestError, match="selective_scan=mamba-ssm cannot run: it needs a GPU"):
        scan.CHOICE(X)


def test_a_kernel_that_takes_no_pieces_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "ssd=mamba-ssm,selective_scan=triton")
    for choice, asked in ((ssd.OF_PIECES, "mamba-ssm"), (scan.OF_PIECES, "triton")):
        says = rf"{choice.name} has no '{asked}' with context_parallel \(there is torch\)"
        with pytest.raises(RequestError, match=says):
            choice(X)


@pytest.mark.processes
def test_the_models_ask_no_gpu_when_they_are_imported_and_their_sizes_no_torch() -> None:
    code = (
        "import sys, torch\n"
        "import training.models.mamba, training.models.llama, training.models.mixtral\n"
        "import training.models.mamba2, training.models.neox, training.models.bamba\n"
        "import training.models.granite, training.models.nemotron\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not {'mamba_ssm', 'triton', 'transformers'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    light = "import sys, training.models, training.config.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", light], check=True)


@pytest.mark.processes
def test_a_run_tells_which_ones_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = (f"--dataset_path={write_text(tmp_path / 'text')}", f"--save_ckpt_path={tmp_path}")
    done = run(0, *TINY, *given, "--num_steps=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("selective_scan: torch on cpu, torch.float32") == 1
    monkeypatch.setenv(VARIABLE, "selective_scan=mamba-ssm")
    refused = run(0, *TINY, *given, "--num_steps=3")
    assert refused.returncode == 2
    assert "error: TRAINING_OPS: selective_scan=mamba-ssm cannot run: it needs" in refused.stderr
