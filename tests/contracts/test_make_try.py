"""`make try` trains the working tree, without an image, after `make dev` has set it up."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("file", ["Makefile", "CONTRIBUTING.md"])
def test_the_packages_that_make_dev_may_install_are_named(file: str, root: Path) -> None:
    script = (root / "setup.sh").read_text()
    first = script[script.index("wanted() {") : script.index("case $goal in dev | venv)")]
    assert re.findall(r'echo "\w+ (\S+) ', first) == ["ca-certificates", "python3-venv"]
    (line,) = re.findall(r"^(?:dev:|make dev ).*", (root / file).read_text(), re.MULTILINE)
    assert line.endswith("; installs no packages but python3-venv, certificates")
