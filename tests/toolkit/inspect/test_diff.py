"""`sqshforge diff`: what differs between two squash files, however they are packed."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sqshforge.host.programs import Programs
from sqshforge.inspect.diff import compare
from tests.support import odd_root
from tests.support.command_line import sqshforge
from tests.support.progress import Following

pytestmark = pytest.mark.processes

SITE = "usr/lib/python3/site-packages"
RANDOM = random.Random(4).randbytes(700_000)  # several blocks and a tail


def squashed(tree: Path, file: Path, *words: str) -> Path:
    Programs().capture(["mksquashfs", tree, file, "-no-progress", "-quiet", *words])
    return file


def package(tree: Path, name: str, version: str) -> None:
    info = tree / SITE / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\n")


def plain(tree: Path) -> Path:
    """Make a tree with something of each kind to change."""
    for name in ("etc", "bin", "deep/er", "var/lib/dpkg"):
        (tree / name).mkdir(parents=True)
    (tree / "etc/environment").write_text("A=1\nB=2\n")
    (tree / "bin/a").write_bytes(RANDOM)
    (tree / "bin/b").hardlink_to(tree / "bin/a")
    (tree / "bin/c").write_text("short")
    (tree / "bin/link").symlink_to("a")
    for number in range(20):
        (tree / f"deep/er/{number}").write_text("x" * number)
    if os.geteuid() == 0:  # others cannot make a device
        os.mknod(tree / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    (tree / "var/lib/dpkg/status").write_text(
        "Package: libc6\nStatus: install ok installed\nVersion: 2.36\n"
    )
    package(tree, "torch", "2.13.0")
    package(tree, "six", "1.16.0")
    for path in [tree, *tree.rglob("*")]:
        os.utime(path, (odd_root.TIME, odd_root.TIME), follow_symlinks=False)
    return tree


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("diff")
    plain(place / "tree")
    return squashed(place / "tree", place / "before.sqsh")


def changed(before: Path, place: Path, change: Callable[[Path], object], *words: str) -> Path:
    """Pack the same tree after a change; folders keep their times."""
    tree = place / "tree"
    Programs().capture(["cp", "-a", before.parent / "tree", tree])
    change(tree)
    for path in [tree, *tree.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            os.utime(path, (odd_root.TIME, odd_root.TIME))
    return squashed(tree, place / "after.sqsh", *words)


def found(before: Path, after: Path) -> Any:
    done = sqshforge("diff", before, after, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize(
    "words",
    [
        ("-comp", "zstd"),
        ("-b", "1M"),
        ("-b", "4K", "-no-fragments"),
        ("-noI", "-noD", "-noF"),
        ("-comp", "xz", "-b", "256K", "-always-use-fragments", "-no-duplicates"),
    ],
    ids=" ".join,
)
def test_the_same_however_packed(before: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    after = changed(before, tmp_path, lambda tree: None, *words)
    done = sqshforge("diff", before, after, "--exit-code")
    assert done.code == 0, done.err
    assert (
        done.out.splitlines()[0] == "entries: 0 removed, 0 added, 0 changed, 0 only in their time"
    )


@pytest.mark.root
def test_everything_odd_is_the_same_as_itself(tmp_path: Path) -> None:
    tree = odd_root.make(tmp_path / "tree")
    one = squashed(tree, tmp_path / "one.sqsh")
    other = squashed(tree, tmp_path / "other.sqsh", "-comp", "lz4", "-b", "64K")
    assert found(one, other)["equal"] is True


def other_device(tree: Path) -> None:
    (tree / "zero").unlink()
    os.mknod(tree / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.utime(tree / "zero", (odd_root.TIME, odd_root.TIME))


def relinked(tree: Path) -> None:
    (tree / "bin/b").unlink()
    shutil.copy2(tree / "bin/a", tree / "bin/b")


def retargeted(tree: Path) -> None:
    (tree / "bin/link").unlink()
    (tree / "bin/link").symlink_to("c\nd")


def turned(tree: Path) -> None:
    (tree / "bin/c").unlink()
    (tree / "bin/c").mkdir()


def within(tree: Path) -> None:
    """Change a byte in the middle, so that size and tail stay the same."""
    with (tree / "bin/a").open("r+b") as file:
        file.seek(200_000)
        file.write(b"!")


def name_gone(tree: Path) -> None:
    (tree / "deep/er/7").unlink()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tree: (tree / "bin/c").write_text("short!"), ["~ /bin/c  content 5 B -> 6 B"]),
        (lambda tree: (tree / "bin/c").write_text("other"), ["~ /bin/c  content"]),
        (within, ["~ /bin/a  content", "~ /bin/b  content"]),
        (lambda tree: (tree / "bin/c").chmod(0o4711), ["~ /bin/c  mode 0644 -> 4711"]),
        pytest.param(
            lambda tree: os.chown(tree / "bin", 5, 6),
            ["~ /bin  owner 0:0 -> 5:6"],
            marks=pytest.mark.root,
        ),
        (
            lambda tree: os.setxattr(tree / "bin", "user.x", b"y"),
            ["~ /bin  extended attributes"],
        ),
        pytest.param(other_device, ["~ /zero  device 1:5 -> 1:3"], marks=pytest.mark.root),
        (relinked, ["~ /bin/a  hard links", "~ /bin/b  hard links"]),
        (retargeted, [r"~ /bin/link  target a -> c\nd"]),
        (turned, ["~ /bin/c  file -> folder"]),
        (name_gone, ["- /deep/er/7  7 B"]),
        (lambda tree: shutil.rmtree(tree / "deep"), ["- /deep  22 entries, 190 B"]),
        (lambda tree: (tree / "new").mkdir(), ["+ /new"]),
        (
            lambda tree: (tree / b"\xff\x1b[1m".decode(errors="surrogateescape")).touch(),
            [r"+ /\xff\x1b[1m"],
        ),
        (
            lambda tree: (tree / "etc/environment").write_text("A=3\nC=4\n"),
            [
                "~ variable A 1 -> 3",
                "- variable B 2",
                "+ variable C 4",
                "~ /etc/environment  content",
            ],
        ),
        (
            lambda tree: (tree / "var/lib/dpkg/status").write_text(
                "Package: libc6\nStatus: install ok installed\nVersion: 2.37\n"
            ),
            ["~ Debian package libc6 2.36 -> 2.37", "~ /var/lib/dpkg/status  content"],
        ),
    ],
)
def test_each_change_is_reported(
    before: Path, tmp_path: Path, change: Callable[[Path], object], expected: list[str]
) -> None:
    after = changed(before, tmp_path, change)
    done = sqshforge("diff", before, after)
    assert done.code == 0, done.err
    assert done.out.splitlines()[:-3] == expected
    assert sqshforge("diff", before, after, "--exit-code").code == 1
    assert sqshforge("diff", before, after, "--exit-code", "--json").code == 1


def test_versions_of_packages(before: Path, tmp_path: Path) -> None:
    def upgrade(tree: Path) -> None:
        shutil.rmtree(tree / SITE / "torch-2.13.0.dist-info")
        shutil.rmtree(tree / SITE / "six-1.16.0.dist-info")
        package(tree, "torch", "2.14.0")
        package(tree, "triton", "3.6.0")

    after = changed(before, tmp_path, upgrade)
    shown = sqshforge("diff", before, after).out.splitlines()
    assert shown[:3] == [
        "- Python package six 1.16.0",
        "~ Python package torch 2.13.0 -> 2.14.0",
        "+ Python package triton 3.6.0",
    ]
    assert shown[-3] == "entries: 4 removed, 4 added, 0 changed, 0 only in their time"
    assert found(before, after)["differences"][1] == {
        "kind": "Python package",
        "name": "torch",
        "before": "2.13.0",
        "after": "2.14.0",
    }


def test_an_update_may_spell_the_name_of_a_package_in_another_way(tmp_path: Path) -> None:
    for name, spelled, version in (("before", "Jinja2", "3.1.3"), ("after", "jinja2", "3.1.4")):
        package(tmp_path / name, spelled, version)
        squashed(tmp_path / name, tmp_path / f"{name}.sqsh")
    shown = sqshforge("diff", tmp_path / "before.sqsh", tmp_path / "after.sqsh").out.splitlines()
    assert [line for line in shown if "Python package" in line] == [
        "~ Python package jinja2 3.1.3 -> 3.1.4"
    ]


def test_times_alone_make_no_difference(before: Path, tmp_path: Path) -> None:
    after = changed(before, tmp_path, lambda tree: os.utime(tree / "bin/c"))
    done = sqshforge("diff", before, after, "--exit-code")
    assert done.code == 0
    assert (
        done.out.splitlines()[0] == "entries: 0 removed, 0 added, 0 changed, 1 only in their time"
    )
    facts = found(before, after)
    assert (facts["equal"], facts["times"], facts["changes"]) == (True, 1, [])


def test_progress_reaches_its_end(before: Path, tmp_path: Path) -> None:
    """Files of different sizes are not read, and most small ones share blocks with others."""

    def grow(tree: Path) -> None:
        within(tree)
        (tree / "big").write_bytes(RANDOM)

    following = Following()
    compare(before, changed(before, tmp_path, grow), following)
    assert following.shares == sorted(following.shares)
    assert following.shares[-1] == 1


def test_what_cannot_be_compared(before: Path, tmp_path: Path) -> None:
    done = sqshforge("diff", before, tmp_path / "none.sqsh", "--exit-code")
    assert (done.code, done.out) == (2, "")
    assert "none.sqsh" in done.err
    (tmp_path / "broken.sqsh").write_bytes(before.read_bytes()[:-9_000])
    done = sqshforge("diff", before, tmp_path / "broken.sqsh")
    assert (done.code, done.out) == (1, "")
    assert "broken.sqsh" in done.err
    assert "Traceback" not in done.err
