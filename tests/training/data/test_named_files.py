"""Files that are given by name, by pattern or as a list: each is read once, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.training.data import test_stream
from tests.training.data.test_splits import cache as cache
from tests.training.data.test_splits import config, write
from training.data.sources import Text, open_evaluation, open_feed
from training.data.splits import find, is_local
from training.data.stream.shards import Shards
from training.errors import RequestError


def test_files_with_commas_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are names or patterns, read once each in the given order; all must exist."""
    folder = write(tmp_path / "mine", "b,c.jsonl", "x/a.jsonl", "y/one.jsonl", "y/two.jsonl")
    y, a = f"{folder}/y/*.jsonl", f"{folder}/x/a.jsonl"
    files = [f"{folder}/y/one.jsonl", f"{folder}/y/two.jsonl", a]
    assert find(f"{y},{a},{a}").files("train") == tuple(files)
    assert Shards(f"{y},{a}", "", "train", 0).count == 3
    assert find(f"{folder}/b,c.jsonl").files("train") == (f"{folder}/b,c.jsonl",)
    monkeypatch.chdir(folder)
    assert Shards("x/a.jsonl,y/one.jsonl", "", "train", 0).count == 2, "relative names, too"
    with pytest.raises(RequestError, match=rf"^no file matches {folder}/none.jsonl$"):
        find(f"{a},{folder}/none.jsonl")
    names = [f"part-{number:05}.jsonl" for number in range(20)]
    write(folder, *names)
    many = ",".join(names)
    assert len(many) > 255, "more than a file's name may have"
    assert is_local(many) and find(many).files("train") == tuple(names)
    longer = ",".join([f"{folder}/./{name}" for name in names] * 30)
    assert is_local(longer) and len(find(longer).files("train")) == 20
    with pytest.raises(RequestError, match=r"^dataset_path: 'part-.*' is not a known source"):
        open_feed(config(dataset_path=many, tokenizer="", shuffle_buffer=1000), 0, 1)


def test_a_file_is_read_by_its_name_whatever_that_means_as_a_pattern(tmp_path: Path) -> None:
    """Neither the neighbor that matches is read, nor nothing."""
    for kind in ("jsonl", "txt"):
        file, folder = f"{tmp_path}/part[1].{kind}", write(tmp_path, f"part[1].{kind}")
        write(folder, f"part1.{kind}")
        write(folder / "in[2]", f"more.{kind}")
        for name in (file, f"{folder}/in[2]/more.{kind}"):
            assert find(name).files("train") == (name,)
        both = f"stream:{file},{folder}/in[2]/more.{kind}"
        read = "".join(test_stream.texts(both))
        assert set(re.findall("<([^ ]*)", read)) == {f"part[1].{kind}", f"more.{kind}"}
    assert Text(file, 8).described() == f"{Path(file).stat().st_size} bytes in 1 files"
    held_out = config(dataset_path=f"stream:{file}", eval_dataset_path=f"text:{file}")
    with pytest.raises(RequestError, match=r"part\[1\].txt is trained on"):
        open_evaluation(held_out, 0, 1)
