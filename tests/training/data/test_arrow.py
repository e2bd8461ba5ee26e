"""A Hugging Face set on disk: every row's tokens, labels shifted by one, clear errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from training.data.arrow import Arrow
from training.data.sampler import Reader
from training.errors import RequestError

datasets = pytest.importorskip("datasets")


def save(path: Path, rows: list[list[int]], labels: list[list[int]] | None = None) -> Path:
    columns = {"input_ids": rows} | ({"labels": labels} if labels else {})
    # Several files and record batches, as in large sets.
    datasets.Dataset.from_dict(columns).save_to_disk(str(path), num_shards=min(3, len(rows)))
    return path


def counted(rows: int, length: int) -> list[list[int]]:
    return np.arange(rows * length).reshape(rows, length).tolist()


def test_a_sample_is_a_row_with_its_labels_shifted_by_one(tmp_path: Path) -> None:
    rows = counted(10, 8)
    labels = [[one + 1000 for one in row] for row in rows]
    labels[4][3] = -100
    samples = Arrow(str(save(tmp_path / "set", rows, labels)), 8)
    assert len(samples) == 10
    for index in range(10):
        sample = samples[index]
        assert sample.inputs.dtype == sample.targets.dtype == torch.int64
        assert sample.weights is None
        assert sample.inputs.tolist() == rows[index]
        assert sample.targets.tolist() == [*labels[index][1:], -100]


def test_without_labels_the_ids_are_the_labels(tmp_path: Path) -> None:
    samples = Arrow(str(save(tmp_path / "set", counted(5, 4))), 4)
    assert samples[3].targets.tolist() == [13, 14, 15, -100]


@pytest.mark.parametrize("pieces", [2, 4])
def test_longer_rows_give_the_samples_of_a_set_with_shorter_ones(
    tmp_path: Path, pieces: int
) -> None:
    long = Arrow(str(save(tmp_path / "long", counted(7, 16))), 16 // pieces)
    short = Arrow(str(save(tmp_path / "short", counted(7 * pieces, 16 // pieces))), 16 // pieces)
    assert len(long) == len(short) == 7 * pieces
    for index in range(len(long)):
        assert torch.equal(long[index].inputs, short[index].inputs)
        assert torch.equal(long[index].targets, short[index].targets)


def test_a_length_that_does_not_divide_the_rows_is_reported(tmp_path: Path) -> None:
    path = str(save(tmp_path / "set", counted(4, 16)))
    for length in (6, 32):
        with pytest.raises(
            RequestError, match=rf"rows of 16 tokens.* seq_length {length}; fix: use 16"
        ):
            Arrow(path, length)


def test_an_epoch_reads_every_row_once(tmp_path: Path) -> None:
    rows = counted(12, 4)
    reader = Reader(
        Arrow(str(save(tmp_path / "set", rows)), 4), batch_size=3, seed=1, rank=0, world_size=1
    )
    found = [row for _ in range(4) for row in reader.next_batch().inputs.tolist()]
    assert sorted(found) == rows and found != rows


@pytest.mark.parametrize("kind", ["uint16", "int32", "int64"])
@pytest.mark.parametrize("fixed", [-1, 4])
def test_other_kinds_of_columns_are_read(tmp_path: Path, kind: str, fixed: int) -> None:
    ids = datasets.Sequence(datasets.Value(kind), length=fixed)
    made = datasets.Dataset.from_dict(
        {"input_ids": counted(5, 4)}, features=datasets.Features({"input_ids": ids})
    )
    made.save_to_disk(str(tmp_path / "set"))
    samples = Arrow(str(tmp_path / "set"), 4)
    assert [samples[index].inputs.tolist() for index in range(5)] == counted(5, 4)
    assert samples.vocab_size == 20


def test_columns_of_other_names_and_selected_rows_do_no_harm(tmp_path: Path) -> None:
    made = datasets.Dataset.from_dict(
        {"input_ids": counted(9, 4), "attention_mask": [[1] * 4] * 9, "text": ["x"] * 9}
    )
    made.select([7, 2, 5]).save_to_disk(str(tmp_path / "set"))
    samples = Arrow(str(tmp_path / "set"), 4)
    assert [int(samples[index].inputs[0]) for index in range(3)] == [28, 8, 20]


def test_padding_is_no_target_where_labels_say_so(tmp_path: Path) -> None:
    made = datasets.Dataset.from_dict(
        {
            "input_ids": [[5, 6, 7, 0]],
            "labels": [[5, 6, 7, -100]],
            "attention_mask": [[True, True, True, False]],
        }
    )
    made.save_to_disk(str(tmp_path / "set"))
    assert Arrow(str(tmp_path / "set"), 4)[0].targets.tolist() == [6, 7, -100, -100]
    made.remove_columns("labels").save_to_disk(str(tmp_path / "bare"))
    with pytest.raises(RequestError, match="has padding"):
        Arrow(str(tmp_path / "bare"), 4)


def test_the_vocabulary_is_that_of_the_set_or_the_largest_id(tmp_path: Path) -> None:
    path = save(tmp_path / "set", [[1, 5, 99, 0]] * 3, [[-100, 1, 120, 3]] * 3)
    samples = Arrow(str(path), 4)
    assert samples.vocab_size == 121
    assert "3 rows of 4 tokens" in samples.described() and "largest id 120" in samples.described()
    (path / "sqshforge.json").write_text(json.dumps({"vocab_size": 50277}))
    samples = Arrow(str(path), 4)
    assert samples.vocab_size == 50277 and "largest" not in samples.described()


def test_the_fingerprint_is_the_content_not_the_place(tmp_path: Path) -> None:
    path = save(tmp_path / "set", counted(4, 8))
    first = Arrow(str(path), 8).fingerprint
    shutil.copytree(path, tmp_path / "moved")
    assert Arrow(str(tmp_path / "moved"), 8).fingerprint == first
    assert Arrow(str(path), 4).fingerprint != first
    assert Arrow(str(save(tmp_path / "more", counted(5, 8))), 8).fingerprint != first


def test_a_dict_of_splits(tmp_path: Path) -> None:
    parts = {"train": counted(4, 4), "validation": [[9, 9, 9, 9]]}
    made: dict[str, Any] = {
        name: datasets.Dataset.from_dict({"input_ids": rows}) for name, rows in parts.items()
    }
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / "set"))
    assert len(Arrow(str(tmp_path / "set"), 4)) == 4
    assert Arrow(str(tmp_path / "set"), 4, split="validation")[0].inputs.tolist() == [9] * 4
    with pytest.raises(RequestError, match="no split 'test'; there are: train, validation"):
        Arrow(str(tmp_path / "set"), 4, split="test")


def test_sets_that_are_not_there_or_not_complete(tmp_path: Path) -> None:
    def shown(path: Path, match: str) -> None:
        with pytest.raises(RequestError, match=match) as raised:
            Arrow(str(path), 4)
        assert "\n" not in str(raised.value)

    shown(tmp_path / "none", "does not exist")
    (tmp_path / "empty").mkdir()
    shown(tmp_path / "empty", r"has no state\.json")
    path = save(tmp_path / "set", counted(400, 4))
    half = tmp_path / "half"
    shutil.copytree(path, half)
    part = max(half.glob("*.arrow"))
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    shown(half, "broken or half-written")
    part.unlink()
    shown(half, "broken or half-written")
    shutil.copytree(path, half, dirs_exist_ok=True)
    (half / "state.json").write_text("{")
    shown(half, "broken or half-written")


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"text": ["a"]}, "no column 'input_ids'; there are: text"),
        ({"input_ids": ["a"]}, "rows of string, not lists of whole numbers"),
        ({"input_ids": [[0.5] * 4]}, "not lists of whole numbers"),
        (
            {"input_ids": [[1] * 4, [1] * 3]},
            "rows of 3 to 4 tokens; fix: make all rows of one length",
        ),
        ({"input_ids": [[1] * 4, None]}, "rows without tokens"),
        ({"input_ids": [[]] * 2, "n": [1, 2]}, "not lists of whole|rows without tokens"),
        ({"input_ids": [[1, None, 2, 3]]}, "missing values in input_ids"),
        ({"input_ids": [[1, -1, 2, 3]]}, "ids below 0"),
        ({"input_ids": [[1] * 4], "labels": [[1] * 3]}, "labels that are not as long"),
        (
            {"input_ids": [[1] * 4] * 3, "labels": [[1] * 4, [-100] * 4, [2, 3, -1, 4]]},
            r"has the label -1 in row 2; fix: write -100 where",
        ),
        (
            {"input_ids": [[1] * 4] * 3, "labels": [[-100] * 4] * 3},
            "only -100 in labels, so no target would count; fix: write the ids of the targets",
        ),
        (
            {"input_ids": [[1] * 4] * 3, "attention_mask": [[1] * 4, [1] * 4, [0, 1, 1, 1]]},
            r"has padding \(attention_mask 0\) in row 2, and no labels, .*; fix: write labels, the",
        ),
    ],
)
def test_rows_that_cannot_be_trained_on(
    tmp_path: Path, columns: dict[str, list[Any]], match: str
) -> None:
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(RequestError, match=match):
        Arrow(str(tmp_path / "set"), 4)


def test_no_rows(tmp_path: Path) -> None:
    made = datasets.Dataset.from_dict({"input_ids": [[1] * 4]}).select([])
    made.save_to_disk(str(tmp_path / "set"))
    with pytest.raises(RequestError, match="has no rows"):
        Arrow(str(tmp_path / "set"), 4)
