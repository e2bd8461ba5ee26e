"""`make try` trains the working tree, without an image."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.mark.processes
def test_the_working_tree_trains(root: Path, tmp_path: Path) -> None:
    flags = f"FLAGS=--num_steps=2 --save_ckpt_path={tmp_path}/try"
    done = subprocess.run(
        ["make", "try", flags], cwd=root, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "done: 2 steps" in done.stdout
    assert (tmp_path / "try/checkpoints/step_2_ckp").is_dir()
