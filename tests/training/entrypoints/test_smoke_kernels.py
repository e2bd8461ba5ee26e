"""The smoke test of compiled kernels, with small modules in place of mamba-ssm's, on the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.processes

MODULE = """
import torch

__version__ = "2.3.2.post1"

class Mamba(torch.nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.inner = torch.nn.Linear(d_model, 2 * d_model)
        self.out = torch.nn.Linear(2 * d_model, d_model)

    def forward(self, x):  # (batch, length, width)
        y = self.out(torch.tanh(self.inner(x)))
        return y if {learns} else y.detach() + 0 * y

class Mamba2(Mamba):
    pass
"""


def tried(folder: Path, module: str) -> subprocess.CompletedProcess[str]:
    (folder / "mamba_ssm.py").write_text(module)
    return subprocess.run(
        [sys.executable, "-m", "training.smoke.kernels", "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("learns", [True, False])
def test_blocks_that_learn_pass_and_others_do_not(tmp_path: Path, learns: bool) -> None:
    done = tried(tmp_path, MODULE.replace("{learns}", str(learns)))
    assert done.returncode == (0 if learns else 1), done.stderr
    assert set(json.loads(done.stdout)) == {"Mamba", "Mamba2"}


def test_the_verdict_is_said_after_all_warnings(tmp_path: Path) -> None:
    """The smoke test reports the last line."""
    warns = 'import warnings\nwarnings.warn("it is deprecated", FutureWarning)\n'
    said = tried(tmp_path, warns + MODULE.replace("{learns}", "False")).stderr.splitlines()
    assert any("it is deprecated" in line for line in said)
    one = r"loss [\d.]+ -> [\d.]+, must fall to half"
    assert re.fullmatch(f"Mamba: {one}; Mamba2: {one}", said[-1])


def test_the_version_of_cuda_mamba_has_no_mamba_2(tmp_path: Path) -> None:
    module = MODULE.replace("{learns}", "True").partition("class Mamba2")[0]
    old = tried(tmp_path, module.replace("2.3.2.post1", "1.2.0.post1"))
    assert old.returncode == 0 and list(json.loads(old.stdout)) == ["Mamba"], old.stderr
    assert tried(tmp_path, module).returncode == 1, "of a later one it is missing"
