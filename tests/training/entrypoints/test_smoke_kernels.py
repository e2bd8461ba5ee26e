"""The smoke test of compiled kernels, with small modules in mamba-ssm's place on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.processes

MODULE = """
import torch

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


@pytest.mark.parametrize("learns", [True, False])
def test_blocks_that_learn_pass_and_others_do_not(tmp_path: Path, learns: bool) -> None:
    (tmp_path / "mamba_ssm.py").write_text(MODULE.replace("{learns}", str(learns)))
    done = subprocess.run(
        [sys.executable, "-m", "training.smoke.kernels", "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (0 if learns else 1), done.stderr
    assert set(json.loads(done.stdout)) == {"Mamba", "Mamba2"}
