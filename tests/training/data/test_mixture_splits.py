"""A mixture of sets with splits: which split is read, and that it is not evaluated on, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.training.data.test_splits import config
from training.data.sources import open_evaluation, open_feed
from training.errors import RequestError

datasets = pytest.importorskip("datasets")


def saved_rows(folder: Path) -> str:
    """Save a set of rows of tokens: one split has rows of 1, the other rows of 2."""
    made = {
        name: datasets.Dataset.from_dict({"input_ids": [[token] * 8] * 4})
        for name, token in (("train", 1), ("validation", 2))
    }
    datasets.DatasetDict(made).save_to_disk(str(folder))
    return str(folder)


def mixed(file: Path, *paths: str) -> str:
    file.write_text(json.dumps([{"path": path, "weight": 1} for path in paths]))
    return f"mixture:{file}"


def test_a_mixture_reads_the_split_that_is_asked_for(tmp_path: Path) -> None:
    one = saved_rows(tmp_path / "one")
    mixture = mixed(tmp_path / "mixture.yaml", one, saved_rows(tmp_path / "two"))
    data: dict[str, str | int] = {"tokenizer": "", "shuffle_buffer": 1000, "batch_size": 4}
    both = config(dataset_path=mixture, eval_dataset_path=mixture, **data)
    held_out = open_evaluation(both, 0, 1)
    assert held_out is not None
    assert held_out.next_rows(range(4)).rows.inputs.unique().tolist() == [2]
    assert open_feed(both, 0, 1).next_rows(range(4)).rows.inputs.unique().tolist() == [1]
    swapped = config(dataset_path=mixture, dataset_split="validation", **data)
    assert open_feed(swapped, 0, 1).next_rows(range(4)).rows.inputs.unique().tolist() == [2]
    absent = config(dataset_path=one, eval_dataset_path=mixture, eval_split="test", **data)
    with pytest.raises(RequestError, match=r"^eval_dataset_path: .*: entry 1: path: .*no split"):
        open_evaluation(absent, 0, 1)


def test_no_part_of_a_mixture_is_evaluated_on_that_is_trained_on(tmp_path: Path) -> None:
    one, two, three = (saved_rows(tmp_path / name) for name in ("one", "two", "three"))
    mixture = mixed(tmp_path / "mixture.yaml", one, two)
    other = mixed(tmp_path / "other.yaml", two, three)
    data: dict[str, str | int] = {"tokenizer": "", "shuffle_buffer": 1000, "eval_split": "train"}
    for train, held_out in ((two, mixture), (mixture, two), (mixture, mixture), (mixture, other)):
        with pytest.raises(
            RequestError, match=r"^eval_dataset_path: .*/train is trained on; fix: hold out"
        ):
            open_evaluation(config(dataset_path=train, eval_dataset_path=held_out, **data), 0, 1)
    assert open_evaluation(config(dataset_path=three, eval_dataset_path=mixture, **data), 0, 1)
