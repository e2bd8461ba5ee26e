"""The cache of bases as a folder: what is kept, what is removed first, and what is not a base."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sqshforge.host import files
from sqshforge.host.programs import Result
from sqshforge.squash.cache import Cache
from sqshforge.squashfs.superblock import Tables
from tests.support.command_line import sqshforge


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "bases", limit=2500)
    for index, key in enumerate("abc"):
        add(cache, key, tmp_path)
        os.utime(cache.folder / f"{key}.sqsh.json", (index, index))
    assert [base.path.stem for base in cache.bases()] == ["c", "b"]
    assert cache.take("b", tmp_path / "copy", jobs=1) is not None
    assert (tmp_path / "copy").read_bytes() == b"B" * 96 + bytes(804) + b"R" * 10
    add(cache, "d", tmp_path)
    assert [base.path.stem for base in cache.bases()] == ["d", "b"]
    assert {path.name.partition(".")[0] for path in cache.folder.iterdir()} == {"b", "d"}


def add(cache: Cache, key: str, folder: Path, size: int = 1000, *, source: str = "test") -> Path:
    """Keep a base of which 900 bytes are content."""
    packed = folder / f"{key}.packed"
    packed.write_bytes(b"A" * 96 + bytes(size - 96))
    cache.folder.mkdir(exist_ok=True)
    tables = Tables(superblock=b"B" * 96, start=900, rest=b"R" * 10)
    cache.add(key, packed, files.piece_digests(packed, 1), tables, source)
    return packed


def test_a_base_larger_than_the_cache_is_kept_while_it_is_used(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "bases", limit=50)
    add(cache, "a", tmp_path)
    assert [base.path.stem for base in cache.bases()] == ["a"]


def test_what_an_image_s_newer_base_has_superseded_goes_before_the_bases_of_others(
    tmp_path: Path,
) -> None:
    cache = Cache(tmp_path / "bases", limit=5000)
    for seconds, (key, source) in enumerate([("else", "else"), ("old", "one"), ("new", "one")]):
        add(cache, key, tmp_path, source=source)
        os.utime(cache.folder / f"{key}.sqsh.json", (seconds, seconds))
    assert [one.path.stem for one in cache.prune(2500)] == ["old"]
    assert [one.path.stem for one in cache.bases()] == ["new", "else"]


def test_a_base_takes_no_space_while_its_file_is_there(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "bases", limit=5000)
    packed = add(cache, "a", tmp_path)
    assert cache.bases()[0].path.samefile(packed)
    packed.unlink()
    assert cache.take("a", tmp_path / "copy", jobs=1) is not None


def test_the_base_of_another_user_is_used_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several users may share a cache; a base that is closed to others does not count."""

    def fails(*given: object, **named: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    cache = Cache(tmp_path / "bases", limit=5000)
    add(cache, "a", tmp_path)
    monkeypatch.setattr(os, "utime", fails)
    assert cache.take("a", tmp_path / "copy", jobs=1) is not None
    monkeypatch.setattr("sqshforge.squash.cache.copy", fails)
    assert cache.take("a", tmp_path / "other", jobs=1) is None


def test_a_file_that_somebody_wrote_to_is_no_base_even_with_its_old_time(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "bases", limit=5000)
    packed = add(cache, "a", tmp_path)
    before = packed.stat()
    with packed.open("r+b") as file:
        file.seek(500)
        file.write(b"!")
    os.utime(packed, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cache.take("a", tmp_path / "copy", jobs=1) is None


def run(*words: str, home: Path) -> Result:
    return sqshforge("cache", *words, env={"SQSHFORGE_CACHE": str(home)})


@pytest.mark.processes
def test_cache_by_command_line(tmp_path: Path) -> None:
    assert "0 bases, 0 B of" in run("ls", home=tmp_path).out
    cache = Cache(tmp_path / "bases", limit=1 << 30)
    for key in "ab":
        add(cache, key, tmp_path, 3_000_000)
    listed = run("ls", home=tmp_path).out.splitlines()
    assert [line.split()[0] for line in listed[:2]] in (["a", "b"], ["b", "a"])
    assert "2 bases, 6.0 MB" in listed[2]
    for words in (("prune", "--keep", "4M"), ("prune",)):
        assert run(*words, home=tmp_path).out.splitlines()[0] == "removed 1 bases, 3.0 MB"
    assert run("prune", "--keep", "much", home=tmp_path).code == 2
    assert list(cache.folder.iterdir()) == []
