"""The documented command line of the Neuron system's tokenizer program, by its own name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.support.runs import run
from tests.training.support.tokenizing import SOURCE, make_tokenizer
from training.data.arrow import Arrow

pytestmark = pytest.mark.processes

PROGRAM = ("-m", "training.tokenize_dataset")


def test_the_documented_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    make_tokenizer(tmp_path / "bpe")
    (tmp_path / "texts").mkdir()
    for path in SOURCE[:4]:
        (tmp_path / "texts" / f"{path.stem}.txt").write_text(path.read_text())
    target = tmp_path / "data" / "wikicorpus_512"
    words = ["--seq_len", "512", "--save_path", str(target), "--num_proc", "2"]
    tokenizer = ["--tokenizer", str(tmp_path / "bpe")]
    done = run(0, *words, *tokenizer, "--dataset", str(tmp_path / "texts"), program=PROGRAM)
    assert done.returncode == 0, done.stderr
    assert f"--dataset_path={target} --seq_length=512" in done.stdout
    assert len(Arrow(str(target), 512)) > 5


def test_a_set_of_the_hub_that_cannot_be_had_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ("--seq_len", "512", "--save_path", str(tmp_path / "set"), "--num_proc", "2")
    named = ("--dataset", "wikicorpus", "--dataset_config", "raw_en", "--tokenizer", "bytes")
    done = run(0, *words, *named, program=PROGRAM)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "error: --dataset: wikicorpus is not a local file or folder, and the hub"
    )
