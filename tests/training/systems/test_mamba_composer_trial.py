"""The file that --trial makes, and changes on the command line; Composer itself is not needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from training.data.packed import Packed
from training.errors import RequestError
from training.mamba_composer import configure

MAKE = "import sys; from training.mamba_composer import configure; configure(sys.argv[1:])"


def test_a_trial_is_made_once(tmp_path: Path) -> None:
    file = tmp_path / "trial" / "config.yaml"
    config = configure([str(file), "--trial", f"trainer.save_folder={tmp_path}"])
    assert config.trainer.save_folder == str(tmp_path)
    assert sorted(one.name for one in file.parent.iterdir()) == [
        "config.yaml",
        "sources.npy",
        "sources.npy.size",
    ]
    data = Packed(config.data.text_paths[0].path, config.data.seq_len, vocab_size=256)
    assert len(data) > config.num_steps * config.data.global_batch_size
    file.write_text(file.read_text().replace("full_name: trial", "full_name: mine"))
    assert configure([str(file), "--trial"]).general.full_name == "mine"


@pytest.mark.processes
def test_all_ranks_may_make_it_at_once(tmp_path: Path) -> None:
    file = tmp_path / "trial" / "config.yaml"
    words = [sys.executable, "-c", MAKE, str(file), "--trial"]
    started = [subprocess.Popen(words) for _ in range(4)]
    assert [one.wait(600) for one in started] == [0] * 4
    assert len(list(file.parent.iterdir())) == 3


def test_changes_count_more_than_the_file(tmp_path: Path) -> None:
    file = str(tmp_path / "config.yaml")
    changes = ["general.full_name=1e3", "optimizer.lr=1e-2"]
    config = configure([file, changes[0], "--trial", changes[1]])
    assert (config.general.full_name, config.optimizer.lr) == ("1e3", 1e-2)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ("general", "'general' is not a change of a setting; fix: write section.name=value"),
        ("generl.full_name=x", "generl: there is no such section; did you mean general"),
        ("optimizer.lrr=1", "optimizer.lrr: there is no such setting; did you mean lr"),
        ("optimizer.lr=fast", "optimizer.lr: must be"),
    ],
)
def test_wrong_changes(change: str, shown: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=shown.replace(".", r"\.")):
        configure([str(tmp_path / "config.yaml"), "--trial", change])
