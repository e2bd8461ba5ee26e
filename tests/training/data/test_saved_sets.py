"""Sets on disk as texts, and already tokenized ones: which can be read, and which cannot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.training.data import test_stream
from tests.training.data.test_splits import BYTES, config, datasets, write
from tests.training.data.test_splits import cache as cache
from training.data.sources import open_feed
from training.data.tokenize.__main__ import tokenize
from training.errors import RequestError


def test_a_set_that_is_tokenized_is_no_stream(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"input_ids": [[1, 2]]}).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(
        RequestError, match="is tokenized already; fix: leave out 'stream:' before it"
    ):
        open_feed(config(dataset_path=f"stream:{tmp_path}/set"), 0, 1)


def test_a_set_on_disk_without_rows_is_refused(tmp_path: Path) -> None:
    folder, rows = tmp_path / "set", datasets.Dataset.from_dict({"text": []})
    rows.save_to_disk(str(folder))
    with pytest.raises(RequestError, match=f"^dataset_path: {folder}: split 'train' has no rows"):
        open_feed(config(dataset_path=f"stream:{folder}"), 0, 1)
    with pytest.raises(RequestError, match=f"^--dataset: {folder}: split 'train' has no rows"):
        tokenize([f"--dataset={folder}", "--tokenizer=bytes", f"--save_path={tmp_path}/made"])
    datasets.DatasetDict(train=rows).save_to_disk(str(tmp_path / "dict"))
    with pytest.raises(RequestError, match="split 'train' has no rows"):
        open_feed(config(dataset_path=f"stream:{tmp_path}/dict"), 0, 1)


@pytest.mark.parametrize(
    ("part", "split"),
    [
        ("train[:50%]", "train"),
        ("train[:2]+train[4:]", "train"),
        ("validation[2:]", "validation"),
        ("train[:2]+validation", "train"),
    ],
)
def test_a_part_of_a_split_that_was_saved_is_read(tmp_path: Path, part: str, split: str) -> None:
    """The library records the part as the split's name, which no option can ask for."""
    source = write(tmp_path / "mine", "train.jsonl", "validation.jsonl", rows=6)
    some = datasets.load_dataset(str(source), split=part)
    some.save_to_disk(str(tmp_path / "set"))
    read = test_stream.texts(f"stream:{tmp_path}/set", batch=1, dataset_split=split)
    assert sorted(re.findall("<[^>]*>", "".join(read))) == sorted(some["text"])
    made = f"--save_path={tmp_path}/made"
    tokenize([f"--dataset={tmp_path}/set", f"--split={split}", *BYTES, made])
    assert datasets.load_from_disk(f"{tmp_path}/made").num_rows == len("".join(some["text"]))


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ("lines/*.jsonl", "write lines:{}/lines/*.jsonl"),
        ("lines/**/*.jsonl", "write lines:{}/lines/*.jsonl"),
        ("lines/part.1.jsonl", "write lines:{}/lines/*.jsonl"),
        ("lines/p*.jsonl", "write lines:{}/lines/p*.jsonl"),
        ("lines", "write lines:{}/lines/*.jsonl"),
        (
            "table/*.parquet",
            "with save_to_disk of the library datasets, and give its folder alone: "
            "'stream:' reads texts",
        ),
    ],
)
def test_files_that_are_tokenized_are_no_stream(tmp_path: Path, source: str, fix: str) -> None:
    tokens = datasets.Dataset.from_dict({"input_ids": [[1, 2]], "attention_mask": [[1, 1]]})
    tokens.to_json(f"{tmp_path}/lines/part.1.jsonl")
    tokens.to_parquet(f"{tmp_path}/table/a.parquet")
    with pytest.raises(RequestError) as error:
        open_feed(config(dataset_path=f"stream:{tmp_path}/{source}"), 0, 1)
    assert "is tokenized already" in str(error.value)
    assert str(error.value).endswith(fix.format(tmp_path))
