"""Packing: the tokens that tokenizing gives, document by document, as training reads them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.support.runs import ROOT, TINY, run, steps
from training.data.layout import LAYOUTS, LOSS_BIT
from training.data.pack import pack
from training.data.packed import Packed, count_tokens
from training.data.tokenize.__main__ import tokenize
from training.errors import RequestError
from training.systems.composer import yaml

datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
END = 0
TEXTS = [f"{number} is not {number + 1}, nor {number * number}. " * 3 for number in range(200)]


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("cache")
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    patch.setenv("HF_HOME", str(folder))
    patch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    yield
    patch.undo()


def words(ids: int) -> Any:
    """Make a tokenizer with this many ids and an end of text."""
    known = {"<|endoftext|>": END, "?": ids - 1, **{str(n): n for n in range(1, ids - 1)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


def source(folder: Path, texts: list[str]) -> str:
    """Write a folder with a tokenizer, a split to train on, and one that is held out."""
    (folder / "data").mkdir(parents=True)
    for name, part in (("train", texts), ("validation", texts[:30])):
        lines = [json.dumps({"text": text}) for text in part]
        (folder / "data" / f"{name}.jsonl").write_text("\n".join(lines))
    words(250).save(str(folder / "tokenizer.json"))
    return f"--dataset={folder}/data"


@pytest.mark.processes
def test_packed_text_is_trained_on_as_its_tokens_are(tmp_path: Path) -> None:
    """Each step by its command line: packing, the configuration, and two training steps."""
    given = source(tmp_path, ["", *TEXTS])
    flags = (given, f"--tokenizer={tmp_path}/tokenizer.json", "--num_proc=1")
    shown = ""
    for split in ("train", "validation"):
        program = ("-m", "training.data.pack")
        asked = (*flags, f"--split={split}", f"--save_path={tmp_path}/{split}.npy")
        done = run(0, *asked, program=program)
        assert done.returncode == 0, done.stderr
        shown = shown or done.stdout
    assert "from 200 texts\n" in shown and f"--dataset_path=packed:{tmp_path}/train.npy" in shown
    assert not list(tmp_path.glob(".*")), "nothing is left of the work"

    tokenize([*flags, "--seq_len=1", f"--save_path={tmp_path}/set"])
    ids = list(chain.from_iterable(datasets.load_from_disk(f"{tmp_path}/set")["input_ids"][:]))
    found = np.fromfile(tmp_path / "train.npy", "<i4")
    assert (found & 0xFFFF).tolist() == ids and count_tokens(f"{tmp_path}/train.npy") == len(ids)
    assert ((found >> LOSS_BIT) == 1).all()
    positions = found >> 16 & 0x3FFF
    assert [at for at, position in enumerate(positions) if position == 0] == (
        [0, *(at + 1 for at, one in enumerate(ids[:-1]) if one == END)]
    )
    assert (np.diff(positions)[positions[1:] > 0] == 1).all()

    create = shlex.split(shown.partition("with Composer: python3 ")[2])
    held_out = f"--eval_paths={tmp_path}/validation.npy"
    argv = [sys.executable, *create, held_out, f"--output={tmp_path}/config.yaml", "--seq_len=16"]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    config = yaml.read(tmp_path / "config.yaml")
    (part,) = config.data.text_paths
    assert (config.data.n_total_tokens, config.model.vocab_size) == (len(ids), 250)
    path = f"--dataset_path=packed:{part.path}"
    more = (f"--eval_dataset_path=packed:{config.data.eval_paths[0].path}", "--batch_size=2")
    save = f"--save_ckpt_path={tmp_path}/run"
    done = run(0, *TINY, path, *more, save, "--num_steps=2", "--report_interval=1")
    assert done.returncode == 0, done.stderr
    assert [one["step"] for one in steps(tmp_path / "run")] == [1, 2]
    first = Packed(part.path, config.data.seq_len, vocab_size=250)[0]
    assert first.inputs.tolist() == ids[:16]


@pytest.mark.parametrize(("layout", "ids"), [("16/14", 70_000), ("17/13", 140_000)])
def test_ids_that_a_layout_has_no_room_for_are_refused(
    tmp_path: Path, layout: str, ids: int
) -> None:
    given = source(tmp_path, TEXTS)
    words(ids).save(str(tmp_path / "large.json"))
    flags = [given, f"--tokenizer={tmp_path}/large.json", f"--save_path={tmp_path}/a.npy"]
    fits = (
        "; fix: take 17/13" if layout == "16/14" else ", too many for any; fix: make a set on disk"
    )
    with pytest.raises(RequestError, match=f"^--layout: {layout} has room for .*{ids:,}{fits}"):
        pack([*flags, f"--layout={layout}"])
    assert not (tmp_path / "a.npy").exists()


def test_what_is_to_be_typed_next_holds_for_a_path_with_spaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my data"
    flags = [source(folder, TEXTS), f"--tokenizer={folder}/tokenizer.json", "--num_proc=1"]
    pack([*flags, f"--save_path={folder}/a b.npy"])
    shown = shlex.split(capsys.readouterr().out.partition("to train with it:")[2])
    assert f"--dataset_path=packed:{folder}/a b.npy" in shown
    assert f"--text_paths={folder}/a b.npy" in shown
    tokenize([*flags, "--seq_len=8", f"--save_path={folder}/set 8"])
    shown = shlex.split(capsys.readouterr().out.partition("to train with it:")[2])
    assert shown == [f"--dataset_path={folder}/set 8", "--seq_length=8"]


def test_long_documents_are_cut_where_positions_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = source(tmp_path, ["7 " * 20_000, "8"])
    flags = [given, f"--tokenizer={tmp_path}/tokenizer.json", "--num_proc=1"]
    pack([*flags, f"--save_path={tmp_path}/a", "--layout=17/13"])
    shown = capsys.readouterr().out
    assert "20,003 tokens" in shown and "from 2 texts, cut into 4 documents" in shown
    assert f"--dataset_path=packed-17/13:{tmp_path}/a" in shown
    found = np.fromfile(tmp_path / "a", "<i4")
    places = np.flatnonzero((found >> 17 & 0x1FFF) == 0)
    assert places.tolist() == [0, 8192, 16384, 20_001]
    one = Packed(f"{tmp_path}/a", 9999, layout=LAYOUTS["17/13"])[0]
    assert one.targets[8190:8193].tolist() == [7, -100, 7], "the cut is no target"


def test_it_is_there_as_a_whole_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = source(tmp_path, TEXTS)
    flags = [given, f"--tokenizer={tmp_path}/tokenizer.json", "--num_proc=1"]
    target = tmp_path / "a.npy"
    pack([*flags, f"--save_path={target}"])
    whole = target.read_bytes()
    with pytest.raises(RequestError, match=r"^--save_path: .*a\.npy already exists"):
        pack([*flags, f"--save_path={target}"])
    # As if a run was killed between naming the file and recording its size.
    (tmp_path / "a.npy.size").unlink()
    (tmp_path / ".a.npy.tokenizing").mkdir()
    (tmp_path / ".a.npy.tokenizing" / "placed").touch()
    pack([*flags, f"--save_path={target}"])
    assert "a.npy is complete" in capsys.readouterr().out
    assert (tmp_path / "a.npy.size").read_text() == f"{len(whole) // 4}\n"
    # As if a run was killed while it worked; another request does not continue it.
    work = tmp_path / ".b.npy.tokenizing"
    work.mkdir()
    (work / "journal.json").write_text(json.dumps({"layout": "16/14"}))
    with pytest.raises(RequestError, match="unfinished work of another request"):
        pack([*flags, f"--save_path={tmp_path}/b.npy"])
