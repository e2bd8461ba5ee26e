"""The layers of an image, merged as an engine does."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from sqshforge.image.archive.image import open_image
from tests.support import archives
from tests.support.archives import (
    EPOCH,
    PLAIN,
    Image,
    file,
    folder,
    layer,
    link,
    merged,
    symlink,
)

# Layers, the lowest first, and the resulting tree.
STACKS: dict[str, tuple[list[bytes], dict[str, str]]] = {
    "a file over a file": (
        [layer(file("a", b"1")), layer(file("a", b"2"))],
        {"a": "2"},
    ),
    "a whiteout hides a file": (
        [layer(file("a"), file("b")), layer(file(".wh.a"))],
        {"b": ""},
    ),
    "a whiteout hides a folder": (
        [layer(folder("d"), file("d/x"), file("b")), layer(file(".wh.d"))],
        {"b": ""},
    ),
    "a whiteout spares its own layer, before it": (
        [layer(file("a", b"1")), layer(file("a", b"2"), file(".wh.a"))],
        {"a": "2"},
    ),
    "a whiteout spares its own layer, after it": (
        [layer(folder("d"), file("d/x")), layer(file(".wh.d"), folder("d"), file("d/y"))],
        {"d": "folder", "d/y": ""},
    ),
    "a whiteout of nothing": (
        [layer(file("a")), layer(file(".wh.b"))],
        {"a": ""},
    ),
    "a whiteout in no folder makes one": (
        [layer(file("a")), layer(file("d/.wh.b"))],
        {"a": "", "d": "folder"},
    ),
    "an opaque folder": (
        [layer(file("d/x"), file("d/e/y")), layer(file("d/z"), file("d/.wh..wh..opq"))],
        {"d": "folder", "d/z": ""},
    ),
    "an opaque root": (
        [layer(file("a")), layer(file(".wh..wh..opq"), file("b"))],
        {"b": ""},
    ),
    "opaque two layers up": (
        [layer(file("d/e/x")), layer(file("d/y")), layer(folder("d"), file("d/.wh..wh..opq"))],
        {"d": "folder"},
    ),
    "what AUFS kept for itself": (
        [layer(file(".wh..wh.aufs"), folder(".wh..wh.plnk"), file(".wh..wh.plnk/1.2"), file("a"))],
        {"a": ""},
    ),
    "an overlay's own whiteout": (
        [layer(file("a"), file("b")), layer(file("a", type=tarfile.CHRTYPE))],
        {"b": ""},
    ),
    "a folder over a file and back": (
        [layer(file("a", b"1")), layer(folder("a"), file("a/b")), layer(file("a", b"3"))],
        {"a": "3"},
    ),
    "a folder over a link": (
        [layer(folder("d"), symlink("l", "d")), layer(folder("l"), file("l/x"))],
        {"d": "folder", "l": "folder", "l/x": ""},
    ),
    "a path over a link of a lower layer": (
        [layer(folder("d"), symlink("l", "d")), layer(file("l/x"))],
        {"d": "folder", "l": "folder", "l/x": ""},
    ),
    "a path through a link of its own layer": (
        [layer(folder("d"), symlink("l", "/d"), file("l/x", b"x"))],
        {"d": "folder", "d/x": "x", "l": "-> /d"},
    ),
    "a path through links that lead up and out": (
        [layer(folder("d"), symlink("d/l", "../../.."), file("d/l/x"))],
        {"d": "folder", "d/l": "-> ../../..", "x": ""},
    ),
    "a link over a folder": (
        [layer(folder("d"), file("d/x")), layer(symlink("d", "/tmp"))],
        {"d": "-> /tmp"},
    ),
    "hard links": (
        [layer(file("z", b"z"), link("a", "z"), link("m", "/a"))],
        {"a": "z", "m": "=> a", "z": "=> a"},
    ),
    "a hard link to a lower layer's file": (
        [layer(file("z", b"z")), layer(link("a", "z"))],
        {"a": "z", "z": "=> a"},
    ),
    "a hard link to a link": (
        [layer(symlink("a", "nowhere"), link("b", "a"))],
        {"a": "-> nowhere", "b": "=> a"},
    ),
    "a hard link that loses its file": (
        [layer(file("a", b"a"), link("b", "a")), layer(file(".wh.a"))],
        {"b": "a"},
    ),
    "a hard link whose file is replaced": (
        [layer(file("a", b"1"), link("b", "a")), layer(file("a", b"2"))],
        {"a": "2", "b": "1"},
    ),
    "the last of a name in a layer": (
        [layer(file("a", b"1"), folder("a"), file("a/x"), file("a", b"3"), file("b"))],
        {"a": "3", "b": ""},
    ),
    "devices and FIFOs": (
        [
            layer(
                file("f", type=tarfile.FIFOTYPE),
                file("c", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
                file("b", type=tarfile.BLKTYPE, devmajor=7, devminor=0),
            )
        ],
        {"b": "disk", "c": "char", "f": "fifo"},
    ),
    "no layer": ([], {}),
    "empty layers": ([layer(), b"", layer(file("a"))], {"a": ""}),
}


@pytest.mark.parametrize("name", STACKS)
def test_layers_merge_as_in_an_engine(name: str, tmp_path: Path) -> None:
    layers, expected = STACKS[name]
    assert merged(tmp_path, *layers) == expected


def test_folders_keep_what_their_last_entry_says(tmp_path: Path) -> None:
    one = layer(folder("tmp", 0o1777, mtime=5), folder("d", 0o700))
    two = layer(file("tmp/x"), folder("d", 0o2755, mtime=7), file("new/x"))
    image = Image([one, two])
    found = archives.parsed(
        archives.output(archives.write(image, "docker-archive", tmp_path / "a"), files={})
    )
    facts = {name: (member.mode, member.mtime) for name, (member, _) in found.items()}
    assert facts["tmp"] == (0o1777, 5)
    assert facts["d"] == (0o2755, 7)
    assert facts["new"] == (0o755, EPOCH)


def test_the_top_names_of_layers(tmp_path: Path) -> None:
    layers = [
        PLAIN,
        layer(folder("sqshforge"), file("./sqshforge/a"), file("/sqshforge/.wh.b")),
        layer(file(".wh.sqshforge")),
        layer(file(".wh..wh..opq")),
        layer(file("sqshforge/a"), file(".wh.bin")),
        layer(symlink("sqshforge/l", "/bin"), file("sqshforge/l/x")),
        layer(),
    ]
    for packing in archives.PACKINGS:
        address = archives.write(Image(layers, packing), "oci", tmp_path / packing)
        with open_image(address) as image:
            found = [image.top_names(index) for index in range(len(layers))]
        ours = {b"sqshforge"}
        assert found[0] - ours
        assert found[1:] == [ours, ours, {b""}, {*ours, b"bin"}, {*ours, b"bin"}, set()]
