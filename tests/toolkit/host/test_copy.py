"""A copy equals its source, whatever part of it is in the page cache, and wherever it goes."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqshforge.host import files
from sqshforge.host.programs import Programs

PAGE, PIECE = files.PAGE, files.COPY_PIECE
SIZES = (0, 1, PAGE - 1, PAGE, PAGE + 1, PIECE - 1, PIECE, 3 * PIECE + 5 * PAGE + 7)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clone") / "source"
    path.write_bytes(random.Random(5).randbytes(SIZES[-1]))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


def forget(path: Path, start: int, size: int) -> None:
    """Drop a part of a file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_DONTNEED)


@pytest.fixture(params=["none", "_Cached", "_Direct"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one of the two ways slow, so that the other one copies almost all parts."""
    monkeypatch.setattr(files, "COPY_PART", 256 * PAGE)
    monkeypatch.setattr(files, "COPY_PIECE", 64 * PAGE)
    if request.param != "none":
        slow = getattr(files, request.param)
        copy = slow.__call__

        def copy_slowly(self: files.CopyMethod, start: int, end: int) -> None:
            time.sleep(0.05)
            copy(self, start, end)

        monkeypatch.setattr(slow, "__call__", copy_slowly)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", SIZES)
def test_the_first_bytes(source: Path, tmp_path: Path, size: int) -> None:
    files.copy(source, tmp_path / "target", size)
    assert (tmp_path / "target").read_bytes() == source.read_bytes()[:size]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("start", [0, 5 * PAGE, PIECE, 2 * PIECE - PAGE])
@pytest.mark.parametrize("length", [PAGE, PIECE, 0])
def test_what_is_not_in_the_page_cache(
    source: Path, tmp_path: Path, start: int, length: int
) -> None:
    source.read_bytes()
    forget(source, start, length)
    files.copy(source, tmp_path / "target", SIZES[-1])
    assert (tmp_path / "target").read_bytes() == source.read_bytes()


def test_it_is_not_copied_over_another_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    with pytest.raises(FileExistsError):
        files.copy(source, tmp_path / "target", PAGE)
    assert (tmp_path / "target").read_text() == "mine"


@pytest.mark.usefixtures("way")
def test_a_source_that_is_shorter_than_it_said(source: Path, tmp_path: Path) -> None:
    forget(source, 0, 0)
    files.copy(source, tmp_path / "target", SIZES[-1] + 3 * PIECE)
    assert (tmp_path / "target").read_bytes() == source.read_bytes()


def test_where_direct_writes_fail(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may accept them at first, but refuse the writes themselves."""
    monkeypatch.setattr(files, "COPY_PART", 256 * PAGE)
    calls = []

    def refuse(self: files.CopyMethod, start: int, end: int) -> None:
        calls.append(start)
        raise OSError("Invalid argument")

    monkeypatch.setattr(files._Direct, "__call__", refuse)
    files.copy(source, tmp_path / "target", SIZES[-1])
    assert (tmp_path / "target").read_bytes() == source.read_bytes()
    assert calls == [0]


@pytest.fixture
def small(as_root: None, tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB that may not support direct writes, as one in memory."""
    place = tmp_path / "small"
    place.mkdir()
    programs = Programs()
    programs.capture(["mount", "-t", "tmpfs", "-o", "size=8M", "sqshforge-test", place])
    try:
        yield place
    finally:
        programs.capture(["umount", place])


@pytest.mark.processes
@pytest.mark.usefixtures("way")
def test_into_memory(source: Path, small: Path) -> None:
    files.copy(source, small / "target", PIECE + 5)
    assert (small / "target").read_bytes() == source.read_bytes()[: PIECE + 5]


@pytest.mark.processes
@pytest.mark.usefixtures("way")
def test_a_full_disk_is_reported(source: Path, small: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        files.copy(source, small / "target", SIZES[-1])
