"""Every kind of data, trained on by the entry point: the same losses on one process and on two."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.support.runs import ENTRY_POINT, ROOT, TINY, run, train, write_text
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


def test_what_is_no_source_is_reported_with_those_that_are(tmp_path: Path) -> None:
    given = (f"--save_ckpt_path={tmp_path}/run", "--num_steps=2")
    for path, says in (
        ("packed:", "is not a known source; fix: use text:GLOB, packed:GLOB"),
        (f"packed:{tmp_path}/none.npy", "error: dataset_path: "),
        (f"lines:{tmp_path}/none", "error: dataset_path: "),
        (f"mixture:{tmp_path}/none", "none: cannot be read: "),
        (f"mixture:{__file__}", "error: dataset_path: "),
    ):
        done = run(0, *TINY, f"--dataset_path={path}", *given)
        assert done.returncode == 2 and says in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


NEURON = ("-m", "training.mamba2_neuron")


@pytest.mark.parametrize("flag", ["dataset_path", "data_dir"])
@pytest.mark.parametrize("is_folder", [True, False])
def test_texts_that_are_given_as_tokens_are_answered_with_what_to_write(
    tmp_path: Path, flag: str, is_folder: bool
) -> None:
    """Following the answer's command makes data to train on."""
    folder = tmp_path / "my texts"
    folder.mkdir()
    rows = [json.dumps({"text": f"{n} is not {n + 1}. " * 9}) for n in range(90)]
    (folder / "mine.jsonl").write_text("\n".join(rows))
    given = folder if is_folder else folder / "mine.jsonl"
    start: tuple[str, ...] = (*TINY, f"--save_ckpt_path={tmp_path}/run", "--num_steps=2")
    if flag == "data_dir":
        start = ("--backend=gloo", "--max_steps=2", f"--checkpoint_dir={tmp_path}/run")
    program = NEURON if flag == "data_dir" else ENTRY_POINT
    done = run(0, *start, f"--{flag}={given}", program=program)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"error: {flag}: {given} has texts, as "), done.stderr
    assert f"write stream:{given} and name a tokenizer" in done.stderr
    command = done.stderr.partition("python3 ")[2].partition(" (and train on")[0]
    words = shlex.split(command.replace("EleutherAI/gpt-neox-20b", "bytes"))
    made = f"{folder}_tokenized" if is_folder else f"{folder}/mine_tokenized"
    assert words[-1] == f"--save_path={made}"
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True)
    if flag == "dataset_path":
        done = run(0, *start, f"--{flag}={made}")
        assert done.returncode == 0, done.stderr


def test_lines_of_tokens_are_answered_with_their_source(tmp_path: Path) -> None:
    line = json.dumps({"input_ids": [1] * 30, "attention_mask": [1] * 30})
    (tmp_path / "a.jsonl").write_text(f"{line}\n" * 9)
    start = (*TINY, f"--save_ckpt_path={tmp_path}/run", "--num_steps=2", "--batch_size=2")
    done = run(0, *start, f"--dataset_path={tmp_path}")
    source = f"lines:{tmp_path}/*.jsonl"
    assert done.returncode == 2 and f"has lines of tokens; fix: write {source}" in done.stderr
    done = run(0, *start, f"--dataset_path={source}")
    assert done.returncode == 0, done.stderr


def test_bytes_for_a_model_of_a_tokenizers_vocabulary_are_a_warning(tmp_path: Path) -> None:
    data = write_text(tmp_path / "data")
    yaml = tmp_path / "run.yaml"
    for vocabulary, warned in ((50280, True), (256, False)):
        sections = {
            "model": {"family": "mamba", "d_model": 32, "n_layer": 1, "vocab_size": vocabulary},
            "data": {"dataset_path": data, "seq_length": 17, "batch_size": 2},
            "run": {"save_ckpt_path": f"{tmp_path}/{vocabulary}", "num_steps": 1},
        }
        yaml.write_text(json.dumps(sections))
        done = run(0, "--config", str(yaml), program=("-m", "training"))
        assert done.returncode == 0, done.stderr
        shown = f"WARNING: {data} is read as bytes, 256 of the 50,280 ids" in done.stdout
        assert shown == warned, done.stdout
