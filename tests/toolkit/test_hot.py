"""Lists of hot files: what they name, and that they still name it after an update."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sqshforge.errors import RequestError
from sqshforge.hot import HotList, generalized

SITE = "usr/local/lib/python3.11/dist-packages"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("usr/lib/libz.so.1.2.13", "usr/lib/libz.so.1.3"),
        ("usr/lib/libpython3.11.so.1.0", "usr/lib/libpython3.13.so.1.0"),
        ("usr/lib/libbfd-2.40-system.so", "usr/lib/libbfd-2.44-system.so"),
        ("usr/bin/python3.11", "usr/bin/python3.12"),
        (f"{SITE}/torch-2.13.0+cpu.dist-info/METADATA", f"{SITE}/torch-2.14.1.dist-info/METADATA"),
        (f"{SITE}/six-1.16.0-py3.11.egg-info", f"{SITE}/six-1.17.0-py3.11.egg-info"),
        ("x/__pycache__/a.cpython-311.pyc", "x/__pycache__/a.cpython-313.pyc"),
        ("x/a.cpython-311-x86_64-linux-gnu.so", "x/a.cpython-312-x86_64-linux-gnu.so"),
        ("torch.libs/libgomp-a34b3233.so.1.0.0", "torch.libs/libgomp-0352e75f.so.1.0.0"),
        ("a.libs/libq-96973f99-934c22de.so.0", "a.libs/libq-040039e1-0352e75f.so.1"),
        ("usr/share/x-1.2/a", "usr/share/x-1.10.3/a"),
    ],
)
def test_a_line_names_the_file_of_the_next_version_too(before: str, after: str) -> None:
    assert HotList.of([before]).found([os.fsencode(after)]) == [os.fsencode(after)]
    assert generalized(generalized(before)) == generalized(before)


@pytest.mark.parametrize(
    "path",
    [
        "usr/lib/x86_64-linux-gnu/libfoo.so",
        "usr/lib/python3/dist-packages/a.py",
        "etc/os-release",
        "usr/lib/locale/C.utf8/LC_CTYPE",
        "usr/lib/libdecadeed-facade.so",
        "usr/lib/some-defaced1/a.py",
    ],
)
def test_what_is_no_version_stays(path: str) -> None:
    assert generalized(path) == path


def test_files_come_in_the_order_of_the_list() -> None:
    hot = HotList.of(["usr/b", "/usr/lib/c.so.1", "usr/a", "usr/b", "gone"])
    paths = [b"usr/a", b"usr/b", b"usr/lib/c.so.1", b"usr/lib/c.so.2", b"usr/z"]
    assert hot.found(paths) == [b"usr/b", b"usr/lib/c.so.1", b"usr/lib/c.so.2", b"usr/a"]
    assert hot.missing(paths) == ["gone"]


def test_a_list_is_the_same_after_it_was_written_and_read(tmp_path: Path) -> None:
    place = tmp_path / "x.txt"
    hot = HotList.of(["with space", "usr/caf\udce9", "# no", "new\nline", "a\\b", " indented"])
    place.write_bytes(hot.text("a comment"))
    assert HotList.read(place) == hot
    assert hot.lines == ("with space", "usr/caf\udce9", "a\\b", " indented")
    assert HotList.read(place).digest == hot.digest


def test_a_list_that_people_wrote_names_the_same_files() -> None:
    """They may have Windows line ends, paths from `find /`, and today's versions."""
    found = HotList.parse("# mine\r\n/usr/lib/libz.so.1.2.13\r\n\r\n/usr/bin/python3.11\r\n")
    assert found == HotList.of(["usr/lib/libz.so.1.3", "usr/bin/python3.12"])


def test_its_digest_is_of_the_paths_and_their_order() -> None:
    first = HotList.parse("# one\na\nb\n")
    assert first.digest == HotList.parse("a\n\nb").digest
    assert first.digest != HotList.parse("b\na\n").digest
    assert HotList.parse("# nothing\n").digest is None


def test_a_list_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        HotList.read(tmp_path / "none.txt")
