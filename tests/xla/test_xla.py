"""The Neuron backend on a real XLA device, which torch-xla provides on the CPU: one process.

Run it with `make test-xla`, in an environment whose torch fits the package index's torch-xla.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.training.support.runs import ROOT, losses, write_text

MODEL = {
    **{"family": "mamba2", "d_model": 64, "n_layer": 2, "vocab_size": 256, "head_dim": 16},
    **{"n_groups": 2, "d_state": 16},
}
QUICK = "--xla_backend_optimization_level=0"
"""Has XLA compile without optimizing: most of the time of these tests was LLVM's."""
COUNT_COMPILED = """
import sys
from pathlib import Path
from torch_xla.debug import metrics
from training.config.yaml import load
from training.trainer.run import set_up
from training.parallel.backend import find_backend

config = load(Path(sys.argv[1]), sys.argv[2:])
trainer = set_up(config, find_backend("neuron").start(config))
with trainer.saver, trainer.phase, trainer.metrics:
    while not trainer.turn():
        print("compiled", trainer.step, metrics.metric_data("CompileTime")[0])
print("compiled", trainer.step, metrics.metric_data("CompileTime")[0])
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("xla")
    settings = {
        "model": MODEL,
        "data": {"dataset_path": write_text(folder / "text"), "seq_length": 33, "batch_size": 2},
        "optim": {"learning_rate": 3e-3},
        "parallel": {"backend": "neuron"},
        "run": {"num_steps": 6, "checkpoint_interval": 3, "report_interval": 2},
    }
    file = folder / "config.yaml"
    file.write_text(json.dumps(settings))
    return file


def start(program: Sequence[str], config: Path, save: Path, device: str, *changes: str) -> str:
    """Train, or let another program do it; returns the output."""
    of_xla = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": QUICK}
    done = subprocess.run(
        [
            *(sys.executable, *program, str(config)),
            *(f"save_ckpt_path={save}", f"device={device}", *changes),
        ],
        env={**os.environ, **of_xla, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


TRAIN = ("-m", "training", "--config")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_are_those_of_the_cpu(config: Path, tmp_path: Path, precision: str) -> None:
    changes = (f"precision={precision}", "gradient_accumulation=2")
    for device in ("cpu", "xla"):
        start(TRAIN, config, tmp_path / device, device, *changes)
    within = 1e-5 if precision == "fp32" else 5e-3
    assert losses(tmp_path / "xla") == pytest.approx(losses(tmp_path / "cpu"), abs=within)


def test_a_run_goes_on_from_the_device_to_the_cpu_and_back(config: Path, tmp_path: Path) -> None:
    start(TRAIN, config, tmp_path / "whole", "cpu", "schedule.name=constant", "warmup=0.0")
    for steps, device in ((2, "xla"), (4, "cpu"), (6, "xla")):
        changes = ("schedule.name=constant", "warmup=0.0", f"num_steps={steps}")
        start(TRAIN, config, tmp_path / "parts", device, *changes)
    expected = losses(tmp_path / "whole")
    assert losses(tmp_path / "parts") == pytest.approx(expected, abs=1e-5)


def test_steps_are_compiled_once(config: Path, tmp_path: Path) -> None:
    """On Neuron each program takes minutes to compile, so none may contain the learning rate."""
    changes = ("num_steps=9", "report_interval=2", "checkpoint_interval=3")
    said = start(("-c", COUNT_COMPILED), config, tmp_path, "xla", *changes)
    counts = [int(count) for _, count in re.findall(r"compiled (\d+) (\d+)", said)]
    assert len(counts) == 9
    assert counts[-2] == counts[5], counts  # there were two reports and two checkpoints before


def test_a_pass_that_only_compiles_saves_nothing(config: Path, tmp_path: Path) -> None:
    said = start(TRAIN, config, tmp_path, "xla", "compile_only=True", "num_steps=1000")
    assert "compile_only: 4 steps were taken, and nothing is saved" in said
    assert not list(tmp_path.glob("checkpoints/step_*"))
