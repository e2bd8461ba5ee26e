"""`sqshforge lock` on a disk that fills up: the existing lock stays as it is."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from click.testing import CliRunner

from sqshforge import lock as locks
from sqshforge import project
from sqshforge.cli import main
from sqshforge.project import Project
from tests.support import checkouts
from tests.toolkit.squash.test_cache_leftovers import small_disk

pytestmark = [pytest.mark.processes, pytest.mark.root]


def test_a_full_disk_leaves_the_lock_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = checkouts.copy(tmp_path / "checkout")
    place = locks.path_of(checkouts.TARGET, root / "recipes")
    good = place.read_text()
    longer = locks.read(checkouts.TARGET, root / "recipes")
    longer = longer.model_copy(update={"unlocked": tuple(f"made up {n}" for n in range(2000))})
    monkeypatch.setattr(project, "find", lambda: Project(root))
    monkeypatch.setattr(locks, "resolve", lambda *_: longer)
    (root / "recipes/locks").rename(root / "recipes/others")
    with small_disk(place.parent, f"{len(good) // 1024 + 16}k") as disk:
        place.write_text(good)
        with pytest.raises(OSError, match="No space left"), (disk / "filler").open("wb") as filler:
            while True:
                filler.write(bytes(4096))
                filler.flush()
        words = ["lock", checkouts.TARGET, "--platform", "linux/amd64"]
        done = CliRunner().invoke(main.cli, words)
        assert isinstance(done.exception, OSError) and done.exception.errno == errno.ENOSPC
        assert place.read_text() == good
        assert {path.name for path in disk.iterdir()} == {place.name, "filler"}
