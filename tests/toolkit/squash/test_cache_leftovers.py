"""What full disks and killed packers leave in the cache of bases: nothing, or it is pruned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sqshforge.host.locks import exclusive
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.squash.cache import Cache
from tests.support import containers
from tests.support.command_line import sqshforge
from tests.toolkit.squash import test_cache, test_pack_kill

pytestmark = pytest.mark.processes


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """Mount a file system of this size on a new folder."""
    place.mkdir()
    Programs().capture(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place])
    try:
        yield place
    finally:
        Programs().capture(["umount", "--lazy", place])


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def prune(home: Path, *words: str) -> list[str]:
    done = sqshforge("cache", "prune", *words, env={"SQSHFORGE_CACHE": str(home)})
    assert done.code == 0, done.err
    return done.out.splitlines()


@pytest.mark.root
@pytest.mark.parametrize("size", ["4k", "8k", "1m"])
def test_of_a_base_that_finds_no_room_nothing_stays(size: str, tmp_path: Path) -> None:
    address = test_pack_kill.image(tmp_path / "image", b"code", 4 << 20)
    output = tmp_path / "a.sqsh"
    with small_disk(tmp_path / "cache", size) as cache:
        env = {"SQSHFORGE_CACHE": str(cache)}
        done = sqshforge("pack", address, "-o", output, "--profile", "fast", env=env)
        assert done.code == 0, done.err
        assert "no base is kept for the next pack" in done.err
        assert "No space left on device" in done.err
        assert files(cache) == set()
    assert output.exists()


def test_prune_removes_what_a_killed_packer_left(tmp_path: Path) -> None:
    """Otherwise only a packer of the same image would, and that may never be packed again."""
    address = test_pack_kill.image(tmp_path / "image", b"code", 64 << 20)
    home = tmp_path / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SQSHFORGE_CACHE", str(home))
        with test_pack_kill.started(address, tmp_path / "a.sqsh") as process:
            assert containers.until(lambda: any(home.rglob(".*.lock")))
            process.kill()
            process.wait()
    assert files(home)
    prune(home, "--keep", "1G")
    assert files(home) == set()


LEFT = {
    "a.sqsh.tables",
    "b.sqsh.json",
    "c.sqsh",
    ".d.sqsh.lock",
    ".e.sqsh.1.tmp",
    ".f.sqsh.tables.2.tmp",
    ".g.sqsh.json.3.tmp",
}


def test_prune_removes_what_belongs_to_no_base(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "bases", limit=1 << 30)
    test_cache.add(cache, "whole", tmp_path)
    whole = files(cache.folder)
    test_cache.add(cache, "shorter", tmp_path)
    record = json.loads((cache.folder / "shorter.sqsh.json").read_text())
    (cache.folder / "shorter.sqsh.json").write_text(json.dumps({**record, "size": 7}))
    for name in LEFT | {".whole.sqsh.tables.4.tmp", "notes.txt"}:
        (cache.folder / name).write_bytes(bytes(1_000_000))
    removed, orphans, _ = prune(tmp_path, "--keep", "1G")
    assert removed == "removed 0 bases, 0 B"
    # Those except for the lock, one written for the whole base, and three of the other base.
    assert orphans == "removed 10 files that failed or killed packers left, 7.0 MB"
    assert files(cache.folder) == whole | {"notes.txt"}


def test_prune_leaves_what_a_packer_works_on(tmp_path: Path) -> None:
    folder = tmp_path / "bases"
    folder.mkdir()
    for name in ("a.sqsh.tables", ".a.sqsh.1.tmp", "b.sqsh.tables"):
        (folder / name).touch()
    with exclusive(folder / ".a.sqsh.lock", "", Reporter(quiet=True)):
        prune(tmp_path)
        assert files(folder) == {"a.sqsh.tables", ".a.sqsh.1.tmp", ".a.sqsh.lock"}
    prune(tmp_path)
    assert files(folder) == set()
