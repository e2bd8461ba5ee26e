"""A launcher's default data is made where the launcher looks, in the form that it reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.training.support.runs import ROOT, run
from tests.training.support.tokenizing import SOURCE, make_tokenizer
from training import llama_fsdp, llama_smp
from training.config.sections import DataConfig
from training.data.arrow import Arrow
from training.data.tokenize.__main__ import FLAGS
from training.get_dataset import DEFAULTS

PROGRAM = ("-m", "training.get_dataset")


@pytest.mark.parametrize("launcher", DEFAULTS)
def test_command_launcher_and_configuration_name_one_path(launcher: str) -> None:
    path = str(DEFAULTS[launcher]["save_path"])
    script = (ROOT / "launch" / f"{launcher}.sbatch").read_text()
    assert re.findall(r"^    data=(/\S*)$", script, re.MULTILINE) == [path]
    data = yaml.safe_load((ROOT / "configs" / f"{launcher}.yaml").read_text())["data"]
    assert data["dataset_path"] == path
    assert data["seq_length"] == DEFAULTS[launcher]["seq_len"]
    assert path in (ROOT / "docs" / "training" / "data.md").read_text()


def test_rows_are_of_a_length_that_every_entry_point_reads_unless_reported_otherwise() -> None:
    def default(flags: Any, name: str) -> int:
        return next(int(flag.default) for flag in flags if flag.name == name)

    length = default(FLAGS, "seq_len")
    assert length == DataConfig.seq_length == DEFAULTS["mamba_fsdp"]["seq_len"]
    for entry_point in (llama_fsdp, llama_smp):
        assert length % default(entry_point.FLAGS, "max_context_width") == 0
    assert length % 128 == DEFAULTS["mamba2_neuron"]["seq_len"] % 128 == 0


@pytest.mark.processes
def test_a_set_of_ones_own_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_tokenizer(tmp_path / "bpe")
    (tmp_path / "texts").mkdir()
    for path in SOURCE[:4]:
        (tmp_path / "texts" / f"{path.stem}.txt").write_text(path.read_text())
    mine = (f"--dataset={tmp_path}/texts", f"--tokenizer={tmp_path}/bpe", "--num_proc=1")
    for launcher, length in (("mamba_fsdp", 4096), ("mamba2_neuron", 512)):
        target = tmp_path / launcher
        done = run(0, f"--launcher={launcher}", *mine, f"--save_path={target}", program=PROGRAM)
        assert done.returncode == 0, done.stderr
        assert len(Arrow(str(target), length)) > 0
    done = run(0, "--tokenizer=bytes", f"--save_path={tmp_path}/none", program=PROGRAM)
    assert done.returncode == 2 and "error: --dataset: wikicorpus is not a local" in done.stderr
    done = run(0, "--launcher=llama_smp", program=PROGRAM)
    assert done.returncode == 2
    assert "--launcher: must be mamba_fsdp or mamba2_neuron, not 'llama_smp'" in done.stderr
