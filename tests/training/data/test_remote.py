"""Copies of data at a URL follow what is there now; file:// stands in for s3://."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training.data.test_stream import config
from training.config.config import DataConfig
from training.data import remote
from training.data.lines import Lines
from training.data.sources import open_source
from training.errors import RequestError, TrainingError


def copied(there: Path, cache: Path) -> dict[str, str]:
    """Copy a folder; returns the contents of the copies, by name."""
    remote._copy(f"file://{there}", cache, "dataset_path")
    return {str(one.relative_to(cache)): one.read_text() for one in cache.rglob("*.json")}


def test_copies_are_what_is_there_now(tmp_path: Path) -> None:
    there, cache = tmp_path / "there", tmp_path / "cache"
    (there / "deep").mkdir(parents=True)
    for name in ("a.json", "deep/b.json", "gone.json"):
        (there / name).write_text(name)
    assert copied(there, cache) == {name: name for name in ("a.json", "deep/b.json", "gone.json")}
    first = (cache / "a.json").stat().st_mtime_ns
    (cache / ".lines").mkdir()
    (cache / ".lines" / "a.json.converted").touch()
    (there / "deep" / "b.json").write_text("DEEP/B.JSON")
    os.utime(there / "deep" / "b.json", (1, 1))
    (there / "gone.json").unlink()
    assert copied(there, cache) == {"a.json": "a.json", "deep/b.json": "DEEP/B.JSON"}
    assert (cache / "a.json").stat().st_mtime_ns == first, "it is not copied again"
    assert (cache / ".lines" / "a.json.converted").exists(), "it is no copy"


def test_copies_that_no_listing_tells_of_are_made_again(tmp_path: Path) -> None:
    there, cache = tmp_path / "there", tmp_path / "cache"
    for folder, text in ((there, "new"), (cache, "old")):
        folder.mkdir()
        (folder / "a.json").write_text(text)
    (cache / "b.json").write_text("old")
    assert copied(there, cache) == {"a.json": "new"}


def test_a_copy_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, cache = tmp_path / "there", tmp_path / "cache"
    there.mkdir()
    for name in ("a.json", "b.json"):
        (there / name).write_text(name)
    fs, _ = remote.open_url(f"file://{there}", "dataset_path")
    get_file = type(fs).get_file

    def breaks(self: object, path: str, to: str) -> None:
        get_file(self, path, to)
        if path.endswith("b.json"):
            raise OSError("connection lost")

    with monkeypatch.context() as patch, pytest.raises(TrainingError, match="connection lost"):
        patch.setattr(type(fs), "get_file", breaks)
        copied(there, cache)
    assert [one.name for one in cache.iterdir()] == ["a.json"], "no part of a file is left"
    first = (cache / "a.json").stat().st_mtime_ns
    assert copied(there, cache) == {"a.json": "a.json", "b.json": "b.json"}
    assert (cache / "a.json").stat().st_mtime_ns == first, "it is not copied again"


def test_parts_of_files_are_of_one_process_and_go_after_a_day(tmp_path: Path) -> None:
    there, cache = tmp_path / "there", tmp_path / "cache"
    there.mkdir()
    cache.mkdir()
    (there / "a.json").write_text("whole")
    mine = cache / f".a.json.{os.getpid()}.partial"  # from a container's process of this number
    old = cache / ".a.json.1.partial"
    for part in (mine, old):
        part.write_text("part")
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    assert copied(there, cache) == {"a.json": "whole"}
    assert mine.read_text() == "part" and not old.exists()


def test_one_file_is_copied_by_its_name(tmp_path: Path) -> None:
    there, cache = tmp_path / "there", tmp_path / "cache"
    there.mkdir()
    for name in ("a.json", "b.json"):
        (there / name).write_text(name)
    assert copied(there / "a.json", cache) == {"a.json": "a.json"}
    first = (cache / "a.json").stat().st_mtime_ns
    assert copied(there / "a.json", cache) == {"a.json": "a.json"}
    assert (cache / "a.json").stat().st_mtime_ns == first, "it is not copied again"


def test_a_pattern_of_names_means_the_copies_too(tmp_path: Path) -> None:
    """It also finds lines whose names are not *.json, at a URL as in a folder."""
    there = tmp_path / "there"
    there.mkdir()
    line = json.dumps({"input_ids": list(range(9)), "attention_mask": [1] * 9})
    for name in ("a.jsonl", "b.jsonl", "c.json"):
        (there / name).write_text(f"{line}\n")
    alone: Any = SimpleNamespace(together=lambda work, copies: work())
    kinds = {"/*.jsonl": 2, "/*.json*": 3, "/*.json": 1, "/c.json": 1, "": 1}
    for pattern, lines in kinds.items():
        data = DataConfig(
            dataset_path=f"lines:file://{there}{pattern}",
            data_cache=str(tmp_path / "cache"),
            seq_length=8,
            batch_size=1,
        )
        fetched = remote.fetch_data(config(data), alone, lambda line: None)
        samples = open_source(fetched, "dataset_path")
        assert isinstance(samples, Lines) and len(samples) == lines


def test_what_is_not_there_removes_no_copy(tmp_path: Path) -> None:
    there, cache = tmp_path / "there", tmp_path / "cache"
    there.mkdir()
    (there / "a.json").write_text("whole")
    copied(there, cache)
    (there / "a.json").unlink()
    with pytest.raises(RequestError, match="has no files"):
        copied(there, cache)
    assert (cache / "a.json").exists()
