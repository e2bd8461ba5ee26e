"""`sqshforge trace`: which files of a sqsh a start reads, and in which order."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sqshforge.host.programs import Programs
from sqshforge.hot import HotList
from sqshforge.image.enroot import ImageConfig
from sqshforge.run import trace
from tests.support import containers, tiny_root
from tests.support.command_line import sqshforge
from tests.support.ordinary_user import existing
from tests.toolkit.squash.test_cache_leftovers import small_disk

LOG = b"""\
FUSE library version: 3.14.0
unique: 16, opcode: OPEN (14), nodeid: 6, insize: 48, pid: 2446
open flags: 0x8000 /usr/bin/sh
   open[93837013367120] flags: 0x8000 /usr/bin/sh
read[93837013367120] 4096 bytes from 0 flags: 0x8000
   read[93837013367120] 4096 bytes from 0
   open[7] flags: 0x8000 /only opened
   open[8] flags: 0x8000 /empty
   read[8] 0 bytes from 0
release[93837013367120] flags: 0x8000
   open[93837013367120] flags: 0x8000 /etc/a name
   read[93837013367120] 10 bytes from 4096
   read[93837013367120] 10 bytes from 8192
   read[99] 10 bytes from 0
"""


def test_a_file_counts_from_its_first_read_on() -> None:
    found = trace.read_log(LOG.splitlines(keepends=True))
    assert found.paths == (b"usr/bin/sh", b"etc/a name")
    assert found.size == 4096 + 20
    assert found.reads[-1] == (b"etc/a name", 8192, 10)


def test_a_large_file_of_which_little_is_read_is_not_hot() -> None:
    large = trace.LARGE + 1
    reads = [("small", 1), ("little", large // 20), ("much", large // 5), ("little", large // 40)]
    found = trace.Trace(tuple(trace.Read(name.encode(), 0, size) for name, size in reads))
    assert found.hot({b"small": large - 1, b"little": large, b"much": large}) == (b"small", b"much")


@pytest.mark.parametrize(
    ("smoke", "wanted"),
    [
        ({"train": {"model_name": "mamba-tiny"}, "imports": ["a"]}, "--model_name=mamba-tiny"),
        ({"imports": ["torch", "training.loggers", "os; exit()", 3]}, "import torch, training.log"),
    ],
)
def test_a_start_is_what_the_recipe_s_smoke_test_begins_with(
    smoke: dict[str, Any], wanted: str
) -> None:
    command = trace.start_command({"smoke": smoke})
    assert command[0] == "python3"
    assert command[-1].startswith(wanted) and "exit" not in command[-1]


@pytest.mark.parametrize("recipe", [{}, {"smoke": None}, {"smoke": {"imports": "x"}}])
def test_a_recipe_without_a_smoke_test_has_no_start(recipe: dict[str, Any]) -> None:
    assert trace.start_command(recipe) == ()


# In a container.

SCRIPT = "cat /usr/third; cat /usr/first; test -e /usr/never; cat /usr/third /sqshforge/code"


def change(root: Path) -> None:
    for name in ("first", "never", "third", "libx.so.1.2"):
        (root / "usr" / name).write_text(name)
    (root / "sqshforge/meta").mkdir(parents=True)
    (root / "sqshforge/code").write_text("code")
    recipe = {"smoke": {"imports": ["a"]}}
    (root / "sqshforge/meta/recipe.yaml").write_text(yaml.safe_dump(recipe))
    # It stands in for Python, which reads a file for each import.
    (root / "usr/bin/python3").write_text("#!/bin/sh\ncat /usr/libx.so.1.2\n")
    (root / "usr/bin/python3").chmod(0o755)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("traced")
    with containers.watched(folder):
        yield tiny_root.sqsh(folder / "tiny", ImageConfig(reference="tiny"), change)


def of_usr(place: Path) -> list[str]:
    lines = HotList.read(place).lines
    return [line for line in lines if line.startswith("usr/") and line.count("/") == 1]


@pytest.mark.processes
def test_the_files_that_a_command_reads_in_their_order(tiny: Path, tmp_path: Path) -> None:
    place = tmp_path / "hot.txt"
    done = sqshforge("trace", tiny, "--list", place, "--", "sh", "-c", SCRIPT)
    assert done.code == 0, done.err
    assert of_usr(place) == ["usr/third", "usr/first"]
    lines = HotList.read(place).lines
    assert lines.index("usr/bin/sh") < lines.index("usr/bin/cat") < lines.index("usr/third")
    assert "usr/lib/x86_64-linux-gnu/libc.so.*" in lines
    assert not [line for line in lines if line.startswith("sqshforge")]


@pytest.mark.processes
def test_a_list_may_be_a_link_to_a_file_or_to_a_stream(tiny: Path, tmp_path: Path) -> None:
    for name, target in (("file", tmp_path / "hot.txt"), ("stream", Path("/proc/self/fd/1"))):
        place = tmp_path / name
        place.symlink_to(target)
        done = sqshforge("trace", tiny, "--list", place, "--", "sh", "-c", SCRIPT)
        assert done.code == 0, done.err
        assert place.readlink() == target
        text = target.read_text() if name == "file" else done.out
        assert "\nusr/third\nusr/first\n" in text


@pytest.mark.processes
@pytest.mark.root
def test_an_ordinary_user_gets_the_same_list(tiny: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "sqshforge", "trace"]
    words = ["--", "sh", "-c", SCRIPT]
    ours = sqshforge("trace", tiny, *words)
    with existing() as user:
        image = user.home / "tiny.sqsh"
        shutil.copy(tiny, image)
        user.take(image)
        theirs = user.run(*argv, image, *words)
        assert not list((user.home / "tmp").iterdir())
    assert theirs.returncode == 0, theirs.stderr
    assert theirs.stdout == ours.out


@pytest.mark.processes
def test_without_a_command_it_is_the_recipe_s(tiny: Path, tmp_path: Path) -> None:
    place = tmp_path / "new" / "hot.txt"
    done = sqshforge("trace", tiny, "--list", place)
    assert done.code == 0, done.err
    assert of_usr(place) == ["usr/libx.so.*"]


@pytest.mark.processes
def test_a_list_is_checked_against_a_file(tiny: Path, tmp_path: Path) -> None:
    place = tmp_path / "hot.txt"
    place.write_bytes(HotList.of(["usr/first", "usr/libx.so.9", *["usr/never"] * 9]).text("x"))
    good = sqshforge("trace", tiny, "--list", place, "--check")
    assert good.code == 0, good.err
    assert "3 of 3 lines name a file" in good.out
    place.write_bytes(HotList.of(["usr/first", "usr/gone"]).text())
    bad = sqshforge("trace", tiny, "--list", place, "--check")
    assert bad.code == 1
    assert "names nothing: usr/gone" in bad.out and "1 of 2 lines" in bad.out
    following = bad.out.partition("next: ")[2].strip()
    assert following.endswith(f" trace {tiny} --list {place}"), following
    place.write_bytes(HotList.of([]).text("x"))
    empty = sqshforge("trace", tiny, "--list", place, "--check")
    assert empty.code == 2 and "the list names no file" in empty.err
    assert f"trace {tiny} --list {place}\n" in empty.err
    other = sqshforge("trace", tiny, "--list", place, "--check", "--platform", "linux/arm64")
    assert other.code == 2 and "leave --platform out" in other.err


@pytest.mark.processes
def test_of_a_command_that_fails_nothing_is_listed(tiny: Path, tmp_path: Path) -> None:
    place = tmp_path / "hot.txt"
    done = sqshforge("trace", tiny, "--list", place, "--", "sh", "-c", "echo why; exit 7")
    assert done.code == 1
    assert "exit code 7" in done.err and "why" in done.err
    assert not place.exists()


@pytest.mark.processes
@pytest.mark.root
def test_a_full_disk_leaves_the_list_whole(tmp_path: Path) -> None:
    def many(root: Path) -> None:
        for number in range(100):
            (root / "usr" / f"{'long' * 20}{number}").write_text("x")

    image = tiny_root.sqsh(tmp_path / "image", change=many)
    with small_disk(tmp_path / "disk", "64k") as disk:
        place = disk / "hot.txt"
        place.write_text("usr/first\n")
        with pytest.raises(OSError, match="No space left"):
            (disk / "filler").write_bytes(bytes(1 << 20))
        done = sqshforge("trace", image, "--list", place, "--", "sh", "-c", "cat /usr/long*")
        assert done.code == 3, done.err
        assert f"  where: {place}" in done.err.splitlines()
        assert place.read_text() == "usr/first\n"


@pytest.mark.processes
def test_what_is_asked_for_in_vain(tiny: Path, tmp_path: Path) -> None:
    both = sqshforge("trace", tiny, "--check", "--", "true")
    assert both.code == 2 and "--check takes no command" in both.err
    no_list = sqshforge("trace", tiny, "--check")
    assert no_list.code == 2 and "--list FILE" in no_list.err
    folder = sqshforge("trace", tiny, "--list", tmp_path, "--", "sh", "-c", SCRIPT)
    assert folder.code == 2 and f"'{tmp_path}' is a directory" in folder.err
    assert "trace a start" not in folder.err
    bare = tiny_root.sqsh(tmp_path / "bare")
    no_recipe = sqshforge("trace", bare)
    assert no_recipe.code == 2 and "-- COMMAND" in no_recipe.err


@pytest.mark.processes
def test_a_machine_without_squashfuse(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("unshare", "mount", "true"):
        found = Programs().which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(programs))
    done = sqshforge("trace", tiny, "--", "true")
    assert done.code == 3
    assert "squashfuse is not installed" in done.err and "fix:" in done.err
