"""Files that are given by name, by pattern or as a list: each is read once, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.training.data import test_stream
from tests.training.data.test_splits import cache as cache
from tests.training.data.test_splits import config, write
from tests.training.data.test_tokenize import rows
from training.data.sources import Text, open_evaluation, open_feed
from training.data.splits import find, is_local
from training.data.stream.shards import Shards
from training.data.tokenize.__main__ import tokenize
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


def test_patterns_of_urls_mean_the_files_that_match(tmp_path: Path) -> None:
    """Each is read once; taken for a file's name, a pattern would lose them without a word."""
    names = ("a.jsonl", "b.jsonl", "in/c.jsonl")
    folder = write(tmp_path / "mine", *names).as_uri()
    read = [f"{folder}/{name}" for name in names]
    assert find(f"{folder}/*.jsonl").files("train") == tuple(read[:2])
    assert find(f"{folder}/**/*.jsonl").files("train") == tuple(read)
    mixed = f"{folder}/*.jsonl,{read[0]},{read[0]},{tmp_path}/mine/in/*.jsonl"
    assert find(mixed).files("train") == (*read[:2], f"{tmp_path}/mine/in/c.jsonl")
    documents = "".join(test_stream.texts(f"stream:{folder}/*.jsonl,{read[2]}", batch=3))
    for name in names:
        assert documents.count(f"<{name} 0>") == 1
    saved = tmp_path / "set"
    flags = ("--tokenizer=bytes", "--seq_len=1", "--num_proc=1")
    tokenize([*flags, f"--dataset={folder}/*.jsonl,{read[0]}", f"--save_path={saved}"])
    tokens = bytes(token for row in rows(saved) for token in row).decode()
    assert [tokens.count(f"<{name} 0>") for name in names] == [1, 1, 0]
    with pytest.raises(RequestError, match=r"^no file matches .*/\*\.txt$"):
        find(f"{folder}/*.txt")
    with pytest.raises(RequestError, match=r"^nope://a/\*\.txt cannot be reached: "):
        find("nope://a/*.txt")
    held_out = config(
        dataset_path=f"stream:{folder}/*.jsonl", eval_dataset_path=f"stream:{read[1]}"
    )
    with pytest.raises(RequestError, match=r"b\.jsonl is trained on"):
        open_evaluation(held_out, 0, 1)


def test_a_name_that_the_library_takes_for_an_archive_s_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "mine", "c::d.jsonl", "e.jsonl")
    for name in ("mine", "mine/*.jsonl", "mine/c::d.jsonl"):
        with pytest.raises(RequestError, match=r"c::d\.jsonl has :: in its path, .*; fix: rename"):
            find(f"{tmp_path}/{name}")
