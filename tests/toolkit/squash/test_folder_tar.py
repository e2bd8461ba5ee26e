"""A mounted image as a tar: which of its files are hot, the order of all, and their content."""

from __future__ import annotations

import errno
import os
import random
import tarfile
from pathlib import Path

import pytest

from sqshforge.errors import WorkError
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.hot import HotList, hot_first, walk_order
from sqshforge.image import address
from sqshforge.squash import folder_tar
from sqshforge.squash.folder_tar import Folder
from sqshforge.squash.pack import Options, pack
from sqshforge.squashfs.image import open_image
from tests.support import odd_root

LONG = "long-" * 30
FILES = (
    *("usr/lib/python3.11/os.py", "usr/lib/python3.12/os.py", "usr/lib/python3/os.py"),
    *("usr/lib/libz.so.1.2.13", "usr/lib/libz.so.1.3", "usr/lib/libz.so"),
    *("usr/lib/a*b", "usr/lib/axb", "usr/lib/six-1.16.0.dist-info/RECORD", "bin-1.2/x-2.0.0-a"),
    *("sqshforge/own", "dev/null-like", ".dockerenv", f"{LONG}/name", "usr-local", "usr/z"),
)
# Also lines that name nothing: a folder, a path through a link, what is not packed or not there.
LINES = (
    *("usr/lib/libz.so.*", "usr/lib/python3.*/os.py", "usr/lib/a*b", "usr/z", "usr/lib", "lib/a*b"),
    *("usr/lib/six-*.dist-info/RECORD", "bin-*/x-*-a", "sqshforge/own", "dev/null-like", "*"),
    *(".dockerenv", f"{LONG}/name", "usr/lib/libz.so.1.3", "usr/lib/axb", "gone/a", "usr//z"),
    *("usr/z/below", "usr/lib/libz.so", "bin-*", "", "usr/l*/axb"),
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "lib").symlink_to("usr/lib")
    return root


def written(
    root: Path, hot: HotList, place: Path, *, devices: bool = False
) -> tuple[list[bytes], Path]:
    with place.open("wb") as out:
        first = folder_tar.write(out, root, hot, lambda _: None, split=True, devices=devices)
    return first, place


def names(place: Path) -> list[str]:
    with tarfile.open(place) as tar:
        return [one.name for one in tar]


@pytest.mark.parametrize("split", [True, False])
def test_hot_files_are_those_that_are_found_among_all(tree: Path, split: bool) -> None:
    """Even if a list is written by hand, and in another order."""
    folder = Folder(os.fsencode(tree), split)
    for lines in (LINES, LINES[::-1]):
        hot = HotList.parse("\n".join(lines))
        found = folder.hot(hot)
        every = [path for path, entry in folder.walk() if entry.is_file(follow_symlinks=False)]
        assert every == sorted(every, key=walk_order)
        assert found == hot_first(hot, every)[0]
        assert len(found) == 11 + (not split)


def test_hot_files_come_first_and_each_once(tree: Path, tmp_path: Path) -> None:
    first, place = written(tree, HotList.parse("usr/z\nbin-*/x-*-a\n"), tmp_path / "a.tar")
    assert first == [b"usr/z", b"bin-1.2/x-2.0.0-a"]
    found = names(place)
    assert found[:2] == ["usr/z", "bin-1.2/x-2.0.0-a"]
    assert found[2:5] == [f"{LONG}/name", "usr/lib/a*b", "usr/lib/axb"]
    assert found.index("usr/z") < found.index("usr-local") and len(found) == len(set(found))
    left_out = {"sqshforge", "sqshforge/own", "dev/null-like", ".dockerenv"}
    assert left_out.isdisjoint(found) and {"dev", "usr", "lib"} <= set(found)


@pytest.mark.parametrize("spliced", [True, False])
def test_content_of_every_size(
    tmp_path: Path, spliced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from a file system that does not support sendfile."""

    def refuses(*_: object) -> int:
        raise OSError(errno.EINVAL, "no")

    if not spliced:
        monkeypatch.setattr(os, "sendfile", refuses)
    root, small = tmp_path / "tree", folder_tar.SMALL
    root.mkdir()
    sizes = (0, 1, 511, 512, 513, small - 1, small, small + 1, (1 << 20) + 5, 5 << 20)
    for size in sizes:
        (root / f"{size}").write_bytes(random.Random(size).randbytes(size))
    _, place = written(root, HotList.of(["513", str(5 << 20)]), tmp_path / "a.tar")
    with tarfile.open(place) as tar:
        assert {one.name for one in tar} == {f"{size}" for size in sizes}
        for size in sizes:
            held = tar.extractfile(f"{size}")
            assert held is not None and held.read() == (root / f"{size}").read_bytes()


def test_several_names_of_one_file(tmp_path: Path) -> None:
    """The first one to come has the content."""
    root = tmp_path / "tree"
    root.mkdir()
    (root / "a").write_text("x")
    for name in ("b", "c"):
        os.link(root / "a", root / name)
    _, place = written(root, HotList.of(["c"]), tmp_path / "a.tar")
    with tarfile.open(place) as tar:
        found = [(one.name, one.islnk() and one.linkname) for one in tar]
    assert found == [("c", False), ("a", "c"), ("b", "c")]


@pytest.mark.parametrize("size", [100, 1 << 20])
def test_a_file_that_becomes_shorter(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    (root / "file").write_bytes(bytes(size))
    seen = os.fstat

    def longer(descriptor: int) -> os.stat_result:
        found = list(seen(descriptor))
        found[6] += 1
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", longer)
    with pytest.raises(WorkError, match="shrank"):
        written(root, HotList(), tmp_path / "a.tar")


@pytest.mark.processes
@pytest.mark.root
def test_empty_files_do_mksquashfs_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With -no-sparse on a tar, mksquashfs returns an empty file's buffer to the wrong cache.

    MALLOC_PERTURB_ fills memory that it has not written with other bytes than zeros; without that
    it failed only now and then.
    """
    monkeypatch.setenv("MALLOC_PERTURB_", "85")
    root = tmp_path / "tree"
    (root / "etc").mkdir(parents=True)
    for index in range(300):
        (root / f"{index:03}-empty").touch()
        (root / f"{index:03}-full").write_bytes(random.Random(index).randbytes(400_000))
    options = Options.of("fast", hot=HotList.of(["001-full"]))
    image = address.parse(f"rootfs:{root}", Programs())
    packed = pack(image, tmp_path / "a.sqsh", options, Programs(), Reporter(quiet=True))
    with open_image(packed.path) as opened:
        names = [name for name in opened.entries if name.endswith((b"-empty", b"-full"))]
    assert len(names) == 600


@pytest.mark.root
def test_all_kinds(tmp_path: Path) -> None:
    root = odd_root.make(tmp_path / "tree")
    for devices in (True, False):
        _, place = written(root, HotList(), tmp_path / "a.tar", devices=devices)
        with tarfile.open(place) as tar:
            found = {one.name: one for one in tar}
        for name, one in found.items():
            mode = (root / name).lstat().st_mode & 0o7777
            widened = 0o700 if one.isdir() else 0o400 if one.isfile() else 0
            assert one.islnk() or one.mode == mode | widened
        assert any(one.isdev() and not one.isfifo() for one in found.values()) is devices
