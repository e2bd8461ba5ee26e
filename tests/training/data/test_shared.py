"""One rank inspects the files, each opens what it reads; how maps are read in random order."""

from __future__ import annotations

import gc
import json
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import page_cache
from tests.training.support.opened_files import BATCH, BATCHES
from tests.training.support.runs import ROOT, TINY, run
from training.data import files, packed
from training.data.base import Samples
from training.data.packed import Packed, PackedWriter
from training.data.sources import open_samples
from training.errors import TrainingError

FILES = 40
KINDS = ("text", "packed", "lines", "set", "stream", "stream of a set", "mixture")
READER = ("-m", "tests.training.support.opened_files")


def write(folder: Path, kind: str) -> str:
    """Write a set of FILES files; returns the dataset_path that reads it."""
    folder.mkdir()
    names = [f"{number:02}" for number in range(FILES)]
    texts = [f"{name} the quick brown fox jumps over the lazy dog " * 9 for name in names]
    if kind in ("set", "stream of a set"):
        datasets = pytest.importorskip("datasets")
        rows = np.arange(FILES * 3 * 16).reshape(-1, 16) % 250
        column = {"input_ids": rows.tolist()} if kind == "set" else {"text": texts * 3}
        made = datasets.Dataset.from_dict(column)
        made.save_to_disk(str(folder / "saved"), num_shards=FILES)
        return f"{'' if kind == 'set' else 'stream:'}{folder}/saved"
    for name, text in zip(names, texts, strict=True):
        ids = list(text.encode())
        if kind == "text":
            (folder / f"{name}.txt").write_text(text)
        elif kind in ("packed", "mixture"):
            with PackedWriter(folder / f"{name}.npy") as file:
                file.write(ids)
        elif kind == "lines":
            line = {"input_ids": ids, "attention_mask": [1] * len(ids)}
            (folder / f"{name}.json").write_text(f"{json.dumps(line)}\n" * 3)
        else:
            (folder / f"{name}.jsonl").write_text(f"{json.dumps({'text': text})}\n" * 3)
    if kind == "mixture":
        parts = [f"- {{path: 'packed:{folder}/{one}*.npy', weight: 1}}" for one in "0123"]
        (folder / "mixture.yaml").write_text("\n".join(parts))
        return f"mixture:{folder}/mixture.yaml"
    pattern = {"text": "/*.txt", "packed": "/*.npy"}.get(kind, "")
    return f"{kind}:{folder}{pattern}"


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_opens_what_it_reads(tmp_path: Path, ranks: int) -> None:
    """Only the first rank looks at all files; the batches are as if each rank did."""
    paths = [write(tmp_path / kind.replace(" ", "_"), kind) for kind in KINDS]
    open_samples(paths[KINDS.index("lines")], 16, "dataset_path", 256, 0)  # convert them
    done = run(ranks, str(tmp_path), *paths, program=READER)
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        shown = json.loads((tmp_path / f"opened-{rank}.json").read_text())
        for kind, one in zip(KINDS, shown, strict=True):
            case = f"rank {rank}, {kind}: {one}"
            assert one["equal"] and one["same"], case
            assert len(one["at_start"]) >= FILES if rank == 0 else not one["at_start"], case
            # A sequence may start in one file and end in the next.
            assert len(one["while_reading"]) <= 2 * BATCH * BATCHES, case
            assert one["while_reading"] or rank == 0, case


@pytest.mark.processes
def test_lines_that_are_not_converted_yet_are_converted_by_all(tmp_path: Path) -> None:
    path = write(tmp_path / "lines", "lines")
    done = run(2, str(tmp_path), path, program=READER)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "lines" / ".lines").glob("[0-9]*.json.*"))) == FILES
    assert all(
        json.loads((tmp_path / f"opened-{rank}.json").read_text())[0]["equal"] for rank in (0, 1)
    )


@pytest.mark.processes
def test_what_is_wrong_with_the_data_is_an_error_of_no_single_rank(tmp_path: Path) -> None:
    flags = (f"--save_ckpt_path={tmp_path}/run", f"--dataset_path=packed:{tmp_path}/none*")
    done = run(2, *TINY, *flags)
    assert done.returncode != 0
    assert done.stderr.startswith("error: dataset_path: no file matches"), done.stderr


@pytest.mark.parametrize("kind", ["text", "packed", "lines", "set", "mixture"])
def test_a_copy_reads_the_same_and_has_no_file_open(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "data", kind)
    samples: Samples = open_samples(path, 16, "dataset_path", 256, 0)
    samples[0]
    sent = pickle.dumps(samples)
    assert len(sent) < 400 * FILES
    copy = pickle.loads(sent)
    assert len(copy) == len(samples) and copy.fingerprint == samples.fingerprint
    assert copy.is_here()
    for index in range(0, len(samples), 7):
        assert torch.equal(copy[index].inputs, samples[index].inputs)
        assert torch.equal(copy[index].targets, samples[index].targets)


def test_a_node_that_has_another_file_says_so_when_it_opens_it(tmp_path: Path) -> None:
    samples = Packed(write(tmp_path / "data", "packed").removeprefix("packed:"), 16)
    copy = pickle.loads(pickle.dumps(samples))
    with PackedWriter(tmp_path / "data" / "07.npy") as file:
        file.write(range(1000))
    per_file = len(samples) // FILES
    copy[6 * per_file]
    with pytest.raises(TrainingError, match=r"07\.npy: has 4,000 bytes, and .*fix: give all nodes"):
        copy[7 * per_file]


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder on the checkout's own disk, as the temporary one may lie in memory."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        yield Path(folder)


def read_of(path: Path, samples: Samples, numbers: list[int]) -> int:
    """Read samples of a file that is not in memory; returns the bytes brought into memory."""
    samples = pickle.loads(pickle.dumps(samples))
    gc.collect()  # mapped pages cannot be dropped
    page_cache.forget(path)
    size = path.stat().st_size
    assert page_cache.share(path, 0, size) < 0.01, "this file system keeps what it is to forget"
    for number in numbers:
        samples[number]
    return round(page_cache.share(path, 0, size) * size)


@pytest.mark.slow
def test_a_large_set_in_random_order_is_not_read_ahead(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the requested pages are read; a small set is read ahead."""
    path = disk / "a.npy"
    with PackedWriter(path) as file:
        for _ in range(500):
            file.write(range(16_000))
    page_cache.forget(path)
    monkeypatch.setattr(packed, "LARGE", 1 << 20)
    length, bytes_of = 1024, 1025 * 4
    numbers = list(range(500, 7000, 400))
    asked = len(numbers) * bytes_of
    large = read_of(path, Packed(str(path), length, shuffled=True), numbers)
    assert asked <= large <= asked + len(numbers) * 2 * page_cache.PAGE
    in_order = read_of(path, Packed(str(path), length), numbers)
    monkeypatch.setattr(packed, "LARGE", files.LARGE)
    small = read_of(path, Packed(str(path), length, shuffled=True), numbers)
    assert in_order > 4 * asked and small > 4 * asked
