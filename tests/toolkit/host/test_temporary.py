"""Temporary folders: those that nobody holds any more are removed, and nothing else is."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqshforge.host import temporary
from sqshforge.host.programs import Programs


@pytest.fixture
def above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_what_is_abandoned_goes_with_the_next_of_its_kind(above: Path) -> None:
    (above / temporary.name("apt") / "lists").mkdir(parents=True)
    other = above / temporary.name("lock")
    other.mkdir()
    with temporary.folder("apt") as first, temporary.folder("apt") as second:
        assert set(above.iterdir()) == {first, second, other}
        assert temporary.abandoned_folders(above) == [other]
    assert list(above.iterdir()) == [other]


@pytest.mark.parametrize(
    "name", ["sqshforge-apt-x", "sqshforge-apt-elsewhere.1.0123456789ab", "apt", "sqshforge-apt-"]
)
def test_what_has_another_name_stays(name: str, above: Path) -> None:
    (above / name).mkdir()
    with temporary.folder("apt"):
        assert (above / name).is_dir()


def test_a_link_with_such_a_name_leads_nowhere(above: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (above / temporary.name("apt")).symlink_to(tmp_path / "kept")
    with temporary.folder("apt"):
        assert (tmp_path / "kept").is_dir()


def test_a_folder_that_may_be_written_but_not_listed_will_do(
    above: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has mode 1733, and the user is an ordinary one, because root may list any."""

    def closed(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "iterdir", closed)
    assert temporary.abandoned_folders(above) == []
    with temporary.folder("apt") as made:
        assert made.parent == above


@pytest.mark.root
def test_what_another_user_made_stays(above: Path) -> None:
    theirs = above / temporary.name("apt")
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    with temporary.folder("apt"):
        assert theirs.is_dir()


@pytest.mark.root
@pytest.mark.processes
def test_what_is_mounted_in_one_is_unmounted_and_not_emptied(above: Path, tmp_path: Path) -> None:
    kept, left = tmp_path / "kept", above / temporary.name("bootstrap")
    for folder in (kept / "inner", left / "dev"):
        folder.mkdir(parents=True)
    for words in (["--bind", kept], ["-t", "tmpfs", "tmpfs"]):
        Programs().capture(["mount", *words, left / "dev"])
    assert len(temporary.mounts(left)) == 2
    with temporary.folder("bootstrap"):
        assert temporary.mounts(left) == [] and not left.exists()
    assert [path.name for path in kept.iterdir()] == ["inner"]


def test_on_a_file_system_without_locks_a_process_that_ended_tells(
    above: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS, for example, does not lock folders."""
    monkeypatch.setattr(temporary, "lock", lambda descriptor: False)
    running, left = above / temporary.name("apt"), above / temporary.name("apt")
    left = left.with_name(left.name.replace(f".{os.getpid()}.", ".999999999."))
    for place in (running, left):
        place.mkdir()
    assert temporary.abandoned_folders(above) == [left]
