"""Every kind of data, trained on by the door: the same losses on one process and on two."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.support.runs import ROOT, TINY, run, train, write_text
from training.data.packed import PackedWriter

pytestmark = pytest.mark.processes

DOCUMENTS = [[(7 * i + j) % 250 for j in range(20 + i % 30)] for i in range(60)]


def text(folder: Path) -> str:
    return write_text(folder)


def packed(folder: Path) -> str:
    folder.mkdir()
    for name in ("a", "b"):
        with PackedWriter(folder / f"{name}.npy") as writer:
            for document in DOCUMENTS:
                writer.write(document)
    return f"packed:{folder}/*.npy"


def lines(folder: Path) -> str:
    folder.mkdir()
    rows = [{"input_ids": one, "attention_mask": [1] * len(one)} for one in DOCUMENTS]
    (folder / "part.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"lines:{folder}"


def synthetic(folder: Path) -> str:
    return "synthetic:"


def mixture(folder: Path) -> str:
    folder.mkdir()
    sources = [(packed(folder / "packed"), 0.7), (text(folder / "text"), 0.3)]
    entries = [{"path": path, "weight": weight, "order": 1} for path, weight in sources]
    (folder / "mixture.yaml").write_text(json.dumps(entries))
    return f"mixture:{folder}/mixture.yaml"


def tokenized(folder: Path) -> str:
    source = text(folder / "text").removeprefix("text:")
    argv = [sys.executable, "-m", "training.data.tokenize", f"--dataset={source}"]
    argv += ["--tokenizer=bytes", "--seq_len=17", f"--save_path={folder}/set"]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    return f"{folder}/set"


@pytest.mark.parametrize("kind", [text, packed, lines, synthetic, mixture, tokenized])
def test_a_run_reads_it(tmp_path: Path, kind: object) -> None:
    assert callable(kind)
    data = kind(tmp_path / "data")
    alone = train(tmp_path / "alone", data, 0, 4, 3)
    assert train(tmp_path / "two", data, 2, 2, 3) == pytest.approx(alone, abs=1e-5)
    again = train(tmp_path / "accumulated", data, 0, 1, 3, "--gradient_accumulation=4")
    assert again == pytest.approx(alone, abs=1e-5)


def test_what_is_no_source_is_told_with_those_that_are(tmp_path: Path) -> None:
    given = (f"--save_ckpt_path={tmp_path}/run", "--num_steps=2")
    for path, says in (
        ("packed:", "is no source that is known; use text:GLOB, packed:GLOB"),
        (f"packed:{tmp_path}/none.npy", "error: dataset_path: "),
        (f"lines:{tmp_path}/none", "error: dataset_path: "),
        (f"mixture:{tmp_path}/none", "none: cannot be read: "),
        (f"mixture:{__file__}", "error: dataset_path: "),
    ):
        done = run(0, *TINY, f"--dataset_path={path}", *given)
        assert done.returncode == 2 and says in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
