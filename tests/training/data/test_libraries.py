"""Reading texts needs libraries that not every image has: the error names those that do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.support.runs import ROOT
from training.data.libraries import IMAGES


@pytest.mark.processes
def test_libraries_that_are_missing_are_named_with_images_that_have_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n')
    (tmp_path / "words.json").write_text("{}")
    for absent, flags in (
        ("datasets", ("--tokenizer=bytes",)),
        ("tokenizers", (f"--tokenizer={tmp_path}/words.json",)),
    ):
        hidden = f"import sys; sys.modules[{absent!r}] = None; from runpy import run_module; "
        program = f"{hidden}run_module('training.data.tokenize', run_name='__main__')"
        asked = (f"--dataset={tmp_path}/a.jsonl", f"--save_path={tmp_path}/set", *flags)
        done = subprocess.run(
            [sys.executable, "-c", program, *asked], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert f"by {absent}, which cannot be imported here" in done.stderr
        assert "pip install 'datasets>=2.19' 'tokenizers" in done.stderr
        assert "use an image that has it: cuda-mamba, " in done.stderr


@pytest.mark.parametrize("target", IMAGES)
def test_images_that_are_named_hold_the_libraries(target: str) -> None:
    lock = json.loads((ROOT / "recipes" / "locks" / f"{target}.lock").read_text())
    packages = {one["name"] for one in lock["python"]["packages"]}
    assert {"datasets", "tokenizers"} <= packages
