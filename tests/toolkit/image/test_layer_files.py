"""The order of an archive's files does not depend on the order in its layers."""

from __future__ import annotations

import io
import random
import sys
import tarfile
from pathlib import Path

import pytest
import zstandard

from sqshforge.host.programs import Programs
from sqshforge.image.archive import layer_files
from tests.support import archives
from tests.support.archives import Image, file, folder, layer, link, symlink, with_layer, write

LARGE = random.Random(1).randbytes(300_000)
# Layers in an order that no walk through their folders gives.
UNSORTED = [
    layer(file("z", b"z"), folder("d"), file("d/y", LARGE), file("d/x", b"x"), file("a", b"a")),
    layer(
        file("d-2", b"2"),
        file("m", LARGE[::-1]),
        link("b", "m"),
        symlink("c", "m"),
        file("d/w", b"w"),
    ),
    layer(file("d/.wh.x"), file("y", b"y"), file("a", b"other")),
]
WALK = ["a", "b", "c", "d", "d/w", "d/y", "d-2", "m", "y", "z"]


def names(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        return [member.name for member in archive.getmembers()]


@pytest.mark.parametrize("packing", ["tar", "gzip", "zstd"])
@pytest.mark.parametrize("in_memory", [8 << 20, 1000])
def test_files_come_in_the_order_of_a_walk(
    packing: str, in_memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_files, "IN_MEMORY", in_memory)
    data = archives.output(write(Image(UNSORTED, packing), "oci", tmp_path / "image"), files={})
    assert names(data) == WALK
    found = {name: content for name, (_, content) in archives.parsed(data).items()}
    assert found["d/y"] == LARGE and found["b"] == LARGE[::-1]
    assert [found[name] for name in ("a", "d/w", "d-2", "y", "z")] == [
        b"other",
        b"w",
        b"2",
        b"y",
        b"z",
    ]
    assert archives.parsed(data)["m"][0].linkname == "b"  # the first name has the content


def test_a_layer_in_order_is_not_kept_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*, max_size: int) -> None:
        raise AssertionError("something was kept back")

    monkeypatch.setattr(layer_files.tempfile, "SpooledTemporaryFile", refuse)
    lower = layer(folder("d"), file("d/a", LARGE), file("d/b", b"b"), file("d-2", b"2"), file("e"))
    upper = layer(folder("d"), file("d/a2", LARGE), file("d/c", b"c"), file("f", LARGE))
    address = write(Image([lower, upper], "gzip"), "oci", tmp_path / "image")
    data = archives.output(address, files={})
    assert names(data) == ["d", "d/a", "d/a2", "d/b", "d/c", "d-2", "e", "f"]


def test_a_later_frame_may_have_a_larger_window(tmp_path: Path) -> None:
    """In zstd:chunked every file has its own frame, and the first files are small."""
    layers = [UNSORTED[0] + bytes(20 << 20), *UNSORTED[1:]]  # more zeros at the end of a tar
    begin, rest = layers[0][:512], layers[0][512:]
    window = zstandard.ZstdCompressionParameters(window_log=25, write_checksum=True)
    large = zstandard.ZstdCompressor(compression_params=window).compressobj()
    for_others = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    first = zstandard.ZstdCompressor().compress(begin) + for_others
    image = with_layer(Image(layers, "zstd"), 0, first + large.compress(rest) + large.flush())
    written = archives.output(write(image, "oci", tmp_path / "image"), files={})
    assert names(written) == WALK


@pytest.mark.processes
def test_layers_with_large_windows_do_not_take_their_memory_at_once(tmp_path: Path) -> None:
    """With the decoders of all 24 layers open at once, they would need 768 MB."""
    window = zstandard.ZstdCompressionParameters.from_level(3, window_log=25)
    compressor = zstandard.ZstdCompressor(compression_params=window)
    chance = random.Random(2)
    # Two files per layer, so that all layers would be open at the same time.
    layers = [
        layer(*(file(f"{part}{n}", chance.randbytes(1000) * 35_000) for part in "ab"))
        for n in range(24)
    ]
    image = Image(layers, "zstd")
    for number, one in enumerate(layers):
        image = with_layer(image, number, compressor.compress(one))
    address = write(image, "oci", tmp_path / "image")
    code = (
        "import re, sys\n"
        "from sqshforge.image.archive.image import open_image\n"
        "with open_image(sys.argv[1]) as image, open('/dev/null', 'wb') as out:\n"
        "    image.write_tar(out, lambda name: True, None, {}, 0, lambda amount: None)\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    argv = [sys.executable, "-c", code, address]
    done = Programs().capture(argv, env={"TMPDIR": str(tmp_path)})
    assert int(done) < 500_000  # kB
