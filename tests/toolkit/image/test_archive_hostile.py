"""Layers that are broken or malicious: each is refused in plain words, or does no harm."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from sqshforge.errors import WorkError
from tests.support.archives import (
    END,
    binary,
    extended,
    file,
    folder,
    header,
    layer,
    link,
    merged,
    old_sparse,
    record,
    sparse,
    symlink,
)

# The content of a layer, and the words of its refusal or the resulting tree.
LAYERS: dict[str, tuple[bytes | list[bytes], str | dict[str, str]]] = {
    # names
    "a name that leads up": (layer(file("../a")), "leads out of the image"),
    "a name that leads up and down": (layer(file("a/../../b")), "leads out of the image"),
    "dots alone": (layer(file("..")), "leads out of the image"),
    "an absolute name": (layer(file("/a", b"x")), {"a": "x"}),
    "an absolute name that leads up": (layer(file("/../../a", b"x")), {"a": "x"}),
    "a name that leads up within": (layer(file("d/../a", b"x")), {"a": "x"}),
    "dots and slashes": (
        layer(file(".//./a/./b//c", b"x")),
        {"a": "folder", "a/b": "folder", "a/b/c": "x"},
    ),
    "an empty name": (header(b"") + header(b"b") + END, {"b": ""}),
    "the root as a file": (header(b".") + header(b"/", b"2", target=b"x") + END, {}),
    "a name with a newline": (layer(file("a\nb")), {"a\nb": ""}),
    "a name with a zero byte": (header(b"a\0b") + END, {"a": ""}),
    "a name with escapes": (layer(file("\x1b[31m")), {"\x1b[31m": ""}),
    "a name that is too long": (layer(file("n" * 256)), "longer than Linux can hold"),
    "a path that is too long": (layer(file("d/" * 2100 + "n")), "longer than Linux can hold"),
    "a thousand folders deep": (
        layer(file("d/" * 1500 + "n")),
        {"d/" * n + "d": "folder" for n in range(1500)} | {"d/" * 1500 + "n": ""},
    ),
    "a name twice": (
        [
            header(b"a", b"0", b"1")
            + b"1"
            + bytes(511)
            + header(b"a", b"0", b"1")
            + b"2"
            + bytes(511)
            + END
        ],
        {"a": "2"},
    ),
    # links
    "links that lead out": (
        layer(symlink("a", "/etc/passwd"), symlink("b", "../../x")),
        {"a": "-> /etc/passwd", "b": "-> ../../x"},
    ),
    "a link without a target": (header(b"a", b"2") + END, "invalid target"),
    "a link with an endless target": (layer(symlink("a", "t" * 5000)), "invalid target"),
    "an entry behind a link that leads out": (
        layer(symlink("a", "../../../tmp"), file("a/x", b"x")),
        {"a": "-> ../../../tmp", "tmp": "folder", "tmp/x": "x"},
    ),
    "an entry behind an absolute link": (
        layer(symlink("a", "/root/.ssh"), file("a/x", b"x")),
        {"a": "-> /root/.ssh", "root": "folder", "root/.ssh": "folder", "root/.ssh/x": "x"},
    ),
    "an entry behind a link in a circle": (
        layer(symlink("a", "b"), symlink("b", "a"), file("a/x")),
        "is inside .*not a folder",
    ),
    "an entry behind a link to itself": (
        layer(symlink("a", "a/a"), file("a/x")),
        "is inside .*not a folder",
    ),
    "an entry behind a link to a file": (
        layer(file("f"), symlink("a", "f"), file("a/x")),
        "is inside .*not a folder",
    ),
    "an entry behind a link to a long name": (
        layer(symlink("a", "n" * 300), file("a/x")),
        "too long",
    ),
    "an entry in a file": (layer(file("a"), file("a/x")), "is inside .*not a folder"),
    "an entry in a device": (
        layer(file("a", type=tarfile.CHRTYPE, devmajor=1), file("a/x")),
        "is inside .*not a folder",
    ),
    "a hard link that leads out": (layer(link("a", "../../etc/passwd")), "leads out of the image"),
    "an absolute hard link": (layer(link("a", "/etc/passwd")), "is not a file"),
    "a hard link to what comes later": (layer(link("a", "b"), file("b")), "is not a file"),
    "a hard link to itself": (layer(link("a", "a")), "is not a file"),
    "a hard link to a folder": (layer(folder("d"), link("a", "d")), "leads to a folder"),
    "a hard link to a lower folder": (
        [layer(folder("d")), layer(link("a", "d"))],
        "is not a file",
    ),
    "a hard link to the root": (layer(link("a", "/")), "leads to a folder"),
    "a hard link without a target": (header(b"a", b"1") + END, "leads to a folder"),
    "hard links in a circle": (layer(link("a", "b"), link("b", "a")), "is not a file"),
    "a hard link through a link that leads out": (
        layer(symlink("l", "/etc"), link("a", "l/passwd")),
        "is not a file",
    ),
    "a hard link with data": (
        header(b"a") + header(b"b", b"1", b"1000", target=b"a") + header(b"c") + END,
        {"a": "", "b": "=> a", "c": ""},
    ),
    # whiteouts
    "a whiteout of the parent": (
        [layer(file("d/a")), layer(file("d/.wh..."))],
        "whiteout without a name",
    ),
    "a whiteout of the folder itself": (layer(file("d/.wh..")), "whiteout without a name"),
    "a whiteout of no name": (layer(file(".wh.")), "whiteout without a name"),
    "a whiteout of the root": (layer(file("/.wh./")), "whiteout without a name"),
    "a whiteout with a path": (
        [layer(file("d/a")), layer(file(".wh.d/a"))],
        "inside a whiteout",
    ),
    "a whiteout that leads up": (layer(file("../.wh.a")), "leads out of the image"),
    "a whiteout in a file": (layer(file("a"), file("a/.wh.b")), "is inside .*not a folder"),
    "a whiteout that is a folder": ([layer(file("a")), layer(folder(".wh.a"))], {}),
    "a whiteout that is a link": (
        [layer(file("a"), file("b")), layer(symlink(".wh.a", "b"))],
        {"b": ""},
    ),
    "a whiteout with data": (
        [layer(file("a"), file("b")), layer(file(".wh.a", b"x" * 700))],
        {"b": ""},
    ),
    "a whiteout of a whiteout": ([layer(file("a")), layer(file(".wh..wh.a"))], {"a": ""}),
    "an opaque marker that is a folder": (
        [layer(file("d/a")), layer(folder("d/.wh..wh..opq"))],
        {"d": "folder"},
    ),
    "an opaque marker that is a link": (
        [layer(file("d/a")), layer(symlink("d/.wh..wh..opq", "/"))],
        {"d": "folder"},
    ),
    "an opaque marker with names in it": (
        [layer(file("a")), layer(file(".wh..wh..opq/x"))],
        {"a": ""},
    ),
    "an opaque marker in a lower file": (
        [layer(file("d")), layer(file("d/.wh..wh..opq"))],
        {"d": "folder"},
    ),
    # headers
    "a long name of 2 GB": (header(b"x", b"L", b"20000000000") + END, "extended header of"),
    "an extended header of 8 EB": (header(b"x", b"x", binary(1 << 62)) + END, "extended header of"),
    "an extended header of negative size": (
        header(b"x", b"x", binary(-5)) + END,
        "extended header of",
    ),
    "a large global header": (header(b"x", b"g", b"20000000") + END, "extended header of"),
    "a global header with nonsense": (extended(b"nonsense", b"g") + END, {"a": ""}),
    "an extended header without an entry": (extended(b"")[:-512] + END, "has no entry"),
    "a record without a length": (
        extended(b"path=x\n") + END,
        "an extended header has an invalid record",
    ),
    "a record that is too long": (
        extended(b"99 path=x\n") + END,
        "an extended header has an invalid record",
    ),
    "a record that is too short": (
        extended(b"3 path=x\n") + END,
        "an extended header has an invalid record",
    ),
    "a record of length zero": (
        extended(b"0 path=x\n") + END,
        "an extended header has an invalid record",
    ),
    "a record of negative length": (
        extended(b"-9 path=x\n") + END,
        "an extended header has an invalid record",
    ),
    "a record with an endless length": (
        extended(b"9" * 5000) + END,
        "an extended header has an invalid record",
    ),
    "a record without a name": (
        extended(b"6 =xy\n\n") + END,
        "an extended header has an invalid record",
    ),
    "a path with a zero byte": (extended(record(b"path", b"a\0b")) + END, "contains a NUL byte"),
    "a path that leads up": (extended(record(b"path", b"../x")) + END, "leads out of the image"),
    "a size that is none": (
        extended(record(b"size", b"-1")) + END,
        "an extended header has an invalid size",
    ),
    "a size of a hundred digits": (
        extended(record(b"size", b"9" * 100)) + END,
        "an extended header has an invalid size",
    ),
    "a time that is none": (
        extended(record(b"mtime", b"never")) + END,
        "an extended header has an invalid time",
    ),
    "a time before all times": (extended(record(b"mtime", b"-99999999999")) + END, {"a": ""}),
    "a time after all times": (extended(record(b"mtime", b"9" * 18)) + END, {"a": ""}),
    "150,000 records": (extended(b"6 a=b\n" * 150_000) + END, {"a": ""}),
    "a checksum that is wrong": (header(checksum=b"000001\0 ") + END, "checksum"),
    "a checksum that is none": (
        header(checksum=b"zzzzzz\0 ") + END,
        "a tar header has an invalid number",
    ),
    "a mode that is none": (header(mode=b"0o7") + END, "a tar header has an invalid number"),
    "a size with a sign": (header(size=b"-1") + END, "a tar header has an invalid number"),
    "a size with an underscore": (header(size=b"1_0") + END, "a tar header has an invalid number"),
    "a negative size": (header(size=binary(-1)) + END, "negative size"),
    "a size of 8 EB": (header(size=binary(1 << 62)) + END, "too many bytes"),
    "a negative time": (header(mtime=binary(-1)) + END, {"a": ""}),
    "a device with binary numbers": (
        header(kind=b"3", major=b"\x80\0\0\0\xff\xff\xff\xff") + END,
        "device",
    ),
    "an unknown kind": (header(kind=b"Z") + END, "an entry type that images do not have"),
    "a folder dump of GNU tar": (
        header(kind=b"D", size=b"5") + bytes(512) + END,
        "an entry type that images do not have",
    ),
    "a part of a file on another volume": (
        header(kind=b"M") + END,
        "an entry type that images do not have",
    ),
    # holes
    "a hole of 8 EB": (old_sparse(b"0", b"0", binary(1 << 62)), "too many bytes"),
    "a hole of 100 GB": (sparse({b"map": b"", b"size": b"100000000000"}), "too many bytes"),
    "pieces that overlap": (
        sparse({b"map": b"0,5,3,5", b"size": b"9"}, bytes(10)),
        "segments of a sparse file overlap",
    ),
    "pieces outside of the file": (
        sparse({b"map": b"90,5", b"size": b"9"}, bytes(5)),
        "add up to its size",
    ),
    "pieces that are not there": (sparse({b"map": b"0,5", b"size": b"9"}), "add up to its size"),
    "pieces without an end": (
        sparse({b"map": b"0,5,7", b"size": b"9"}, bytes(5)),
        "a sparse file has an invalid map",
    ),
    "pieces that are no numbers": (
        sparse({b"map": b"a,b", b"size": b"9"}),
        "map has an invalid number",
    ),
    "a negative piece": (old_sparse(binary(-5), b"1", b"7", stored=1), "overlap"),
    "pieces that never end": (old_sparse(b"0", b"0", b"7", more=1), "middle of an entry"),
    "more pieces than memory": (
        old_sparse(b"0", b"0", b"7", 1) + (b"0".ljust(12, b"\0") * 42 + b"\1" + bytes(7)) * 7000,
        "pieces",
    ),
    "a map of 9 EB of lines": (
        sparse({b"major": b"1", b"minor": b"0", b"realsize": b"9"}, b"9" * 30 + b"\n" + bytes(481)),
        "map has an invalid number",
    ),
    "a map without lines": (
        sparse({b"major": b"1", b"minor": b"0", b"realsize": b"9"}, bytes(512)),
        "a sparse file has an invalid map",
    ),
    "a map of more lines than stored": (
        sparse({b"major": b"1", b"minor": b"0", b"realsize": b"9"}, b"9\n0\n" + bytes(508)),
        "a sparse file has an invalid map",
    ),
    "a sparse form of the future": (sparse({b"major": b"2", b"minor": b"0"}), "unknown form"),
    "a sparse name that leads up": (
        sparse({b"map": b"", b"size": b"0", b"name": b"../x"}),
        "leads out",
    ),
    # ends
    "it ends in a header": (layer(file("a"))[:300], "middle of an entry"),
    "it ends in data": (layer(file("a", b"x" * 2000))[:1500], "middle of an entry"),
    "it ends in an extended header": (
        extended(record(b"path", b"x" * 600))[:700],
        "middle of an entry",
    ),
    "it ends without a mark": (header(b"a"), {"a": ""}),
    "it ends with half a mark": (header(b"a") + bytes(512), {"a": ""}),
    "garbage after the end mark": (header(b"a") + END + b"garbage" * 1000, {"a": ""}),
    "a block of zeros in between": (header(b"a") + bytes(512) + header(b"b"), "block of zeros"),
    "no tar at all": (b"<html>" * 1000, "a tar header has an invalid number|checksum"),
    "a layer in bzip2": (b"BZh9" + bytes(600), "compressed with bzip2"),
    "a layer in xz": (b"\xfd7zXZ\0" + bytes(600), "compressed with xz"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, tmp_path: Path) -> None:
    layers, expected = LAYERS[name]
    layers = layers if isinstance(layers, list) else [layers]
    before = sorted(tmp_path.parent.iterdir())
    if isinstance(expected, str):
        with pytest.raises(WorkError, match=expected) as caught:
            merged(tmp_path, *layers)
        assert caught.value.where and caught.value.fix
        assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    else:
        found = merged(tmp_path, *layers)
        assert found == expected
    assert sorted(tmp_path.parent.iterdir()) == before
