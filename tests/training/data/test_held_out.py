"""Held-out data is read to its end: each sample counts once, whatever the ranks and batches."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from tests.training.data.test_stream import config
from tests.training.support.runs import TINY, run, write_text
from training.config.config import Config, DataConfig
from training.data.packed import PackedWriter
from training.data.sources import open_evaluation, open_feed
from training.errors import RequestError

LENGTH, SAMPLES = 4, 11


def held_out(folder: Path, kind: str) -> str:
    """Write eleven samples, each with its own ids."""
    folder.mkdir()
    rows = [[LENGTH * n + i for i in range(LENGTH)] for n in range(SAMPLES)]
    if kind == "text":
        (folder / "a.txt").write_bytes(bytes(range(SAMPLES * LENGTH + 1)))
        return f"text:{folder}/*.txt"
    if kind == "packed":
        with PackedWriter(folder / "a.npy") as packed:
            packed.write(range(SAMPLES * (LENGTH + 1)))
        return f"packed:{folder}/*.npy"
    if kind == "lines":
        lines = [json.dumps({"input_ids": row, "attention_mask": [1] * LENGTH}) for row in rows]
        (folder / "a.json").write_text("\n".join(lines))
        return f"lines:{folder}"
    columns = {"input_ids": rows, "labels": rows, "attention_mask": [[1] * LENGTH] * SAMPLES}
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "set"))
    return str(folder / "set")


@pytest.mark.parametrize("kind", ["text", "packed", "lines", "set"])
def test_every_sample_counts_once(tmp_path: Path, kind: str) -> None:
    path, train = held_out(tmp_path / "held", kind), write_text(tmp_path / "text")
    found = {}
    for world, batch in ((1, 1), (1, 4), (2, 3), (3, 1), (4, 2), (5, 8)):
        data = DataConfig(
            dataset_path=train,
            eval_dataset_path=path,
            seq_length=LENGTH,
            batch_size=1,
            eval_batch_size=batch,
        )
        feeds = [open_evaluation(config(data), rank, world) for rank in range(world)]
        for again in range(2):
            rows: list[list[int]] = []
            while True:
                parts = [one.next_rows(range(batch)) for one in feeds if one is not None]
                assert len(parts) == world and len({part.spent for part in parts}) == 1
                if parts[0].spent:
                    break
                rows += [row for part in parts for row in part.rows.targets.tolist()]
            found[world, batch, again] = sorted(row for row in rows if max(row) >= 0)
            for one in feeds:
                assert one is not None
                one.rewind()
    first = found[1, 1, 0]
    assert len(first) == SAMPLES == len({tuple(row) for row in first})
    assert all(rows == first for rows in found.values())


def test_held_out_data_without_a_sample_is_refused(tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("few")
    few, train = f"text:{tmp_path}/few.txt", write_text(tmp_path / "text")
    data = DataConfig(dataset_path=train, eval_dataset_path=few, seq_length=LENGTH, batch_size=1)
    with pytest.raises(RequestError, match=r"^eval_dataset_path: has 3 bytes .* make 0 samples"):
        open_evaluation(config(data), 0, 2)
    short = DataConfig(dataset_path=few, seq_length=2, batch_size=2)
    with pytest.raises(RequestError, match=r"1 samples of seq_length 2; one step needs 2"):
        open_feed(config(short), 0, 1)


@pytest.mark.processes
def test_an_evaluation_is_the_same_on_any_ranks(tmp_path: Path) -> None:
    train = write_text(tmp_path / "text")
    held = write_text(tmp_path / "held", 18 * 11)
    given = []
    for ranks, batch in ((0, 1), (2, 4)):
        save = tmp_path / f"{ranks}"
        evaluation = (f"--eval_dataset_path={held}", f"--eval_batch_size={batch}")
        done = run(
            ranks,
            *(*TINY, f"--dataset_path={train}", f"--save_ckpt_path={save}", *evaluation),
            *("--eval_batches=0", "--num_steps=1", f"--batch_size={2 // max(1, ranks)}"),
        )
        assert done.returncode == 0, done.stderr
        lines = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
        given += [line for line in lines if line["kind"] == "evaluation"]
    assert [one["tokens"] for one in given] == [11 * 17, 11 * 17]
    assert given[0]["loss"] == pytest.approx(given[1]["loss"], abs=1e-5)


@pytest.mark.parametrize("kind", ["text", "packed", "lines", "set", "mixture"])
def test_what_is_trained_on_is_not_held_out(tmp_path: Path, kind: str) -> None:
    """Files decide, whatever the kinds and patterns, and whether all or some are shared."""
    path = held_out(tmp_path / "one", "text" if kind == "mixture" else kind)
    other = held_out(tmp_path / "two", "text")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    both = tmp_path / "both.yaml"
    both.write_text(json.dumps([{"path": one, "weight": 1} for one in (other, path)]))
    if kind == "mixture":
        path = f"mixture:{both}"
    linked = path.replace("/one/", "/link/")
    linked = linked.replace("/one", "/link")
    for train, held in ((path, path), (path, linked), (f"mixture:{both}", path)):
        with pytest.raises(
            RequestError, match=r"^eval_dataset_path: .*/.* is trained on; fix: hold out"
        ):
            open_evaluation(asked(train, held), 0, 1)
    assert kind == "mixture" or open_evaluation(asked(other, path), 0, 1)


def test_a_part_of_what_is_trained_on_is_not_held_out(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("some text " * 9)
    a, b = (f"text:{tmp_path}/{name}.txt" for name in "ab")
    with pytest.raises(RequestError, match=rf"^eval_dataset_path: {tmp_path}/a.txt is trained on"):
        open_evaluation(asked(a, f"text:{tmp_path}/*.txt"), 0, 1)
    with pytest.raises(RequestError, match=rf"^eval_dataset_path: {tmp_path}/a.txt is trained on"):
        stream = DataConfig(
            dataset_path=a,
            eval_dataset_path=f"stream:{tmp_path}/*.txt",
            seq_length=LENGTH,
            batch_size=1,
            tokenizer="bytes",
        )
        open_evaluation(config(stream), 0, 1)
    assert open_evaluation(asked(a, b), 0, 1)


def asked(train: str, held: str) -> Config:
    return config(
        DataConfig(dataset_path=train, eval_dataset_path=held, seq_length=LENGTH, batch_size=1)
    )
