"""Archives that are damaged, or that unpack to more than they should."""

from __future__ import annotations

import gzip
import io
import os
import random
import resource
import tarfile
import time
import zlib
from pathlib import Path

import pytest
import zstandard

from sqshforge.errors import RequestError, SqshforgeError, WorkError
from sqshforge.image.archive.image import open_image
from sqshforge.tar import limits
from tests.support import archives
from tests.support.archives import (
    END,
    Image,
    binary,
    file,
    folder,
    header,
    layer,
    link,
    refused,
    symlink,
)

ONE = layer(file("a", b"content" * 10_000), file("b", random.Random(0).randbytes(9999)))
GZIP = gzip.compress(ONE, mtime=0)
ZSTD = zstandard.ZstdCompressor(write_checksum=True).compress(ONE)
BLOBS: dict[str, tuple[bytes, str]] = {
    "gzip that ends early": (GZIP[:-20], "cannot be decompressed"),
    "gzip without its check": (GZIP[:-8], "cannot be decompressed"),
    "gzip with a wrong check": (GZIP[:-8] + b"\0" * 8, "cannot be decompressed"),
    "gzip with a flipped byte": (
        GZIP[:200] + bytes([GZIP[200] ^ 255]) + GZIP[201:],
        "decompressed|broken|digest",
    ),
    "gzip and garbage": (GZIP + b"garbage", "cannot be decompressed"),
    "a gzip header alone": (GZIP[:10], "cannot be decompressed"),
    "two bytes of gzip": (GZIP[:2], "cannot be decompressed"),
    "zstd that ends early": (ZSTD[:-20], "decompressed|middle of an entry|digest"),
    "zstd with a wrong check": (ZSTD[:-4] + bytes(4), "cannot be decompressed"),
    "zstd and garbage": (ZSTD + b"garbage", "cannot be decompressed"),
    "a zstd header alone": (ZSTD[:6], "digest|decompressed"),
    "a zstd window of 2 GB": (b"\x28\xb5\x2f\xfd\x00\xa8" + bytes(100), "cannot be decompressed"),
    "another layer": (layer(file("other")), "content does not match its digest"),
    "nothing": (b"\0", "middle of an entry|does not match its digest"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BLOBS)
@pytest.mark.parametrize("kind", ["oci", "docker-archive"])
def test_blobs(name: str, kind: str, tmp_path: Path) -> None:
    blob, expected = BLOBS[name]
    image = archives.with_layer(Image([ONE], "gzip"), 0, blob)
    refused(archives.write(image, kind, tmp_path / "image"), expected)


@pytest.mark.parametrize("packing", archives.PACKINGS)
@pytest.mark.parametrize("kind", ["flipped", "short", "swapped"])
def test_a_blob_that_was_damaged(kind: str, packing: str, tmp_path: Path) -> None:
    image = Image([ONE], packing)
    address = archives.write(image, "oci", tmp_path / "oci")
    blob = image.packed()[0]
    path = tmp_path / "oci/blobs/sha256" / archives.sha256(blob)[7:]
    damaged = {
        "flipped": blob[:500] + bytes([blob[500] ^ 1]) + blob[501:],
        "short": blob[:-1],
        "swapped": archives.PACKINGS[packing](ONE[::-1])[: len(blob)].ljust(len(blob), b"\0"),
    }
    path.write_bytes(damaged[kind])
    refused(address, "announced" if kind == "short" else "does not match its digest")


def test_nothing_is_written_of_what_is_not_right(tmp_path: Path) -> None:
    image = archives.with_layer(Image([ONE, ONE]), 1, layer(file("other")))
    address = archives.write(image, "docker-archive", tmp_path / "image")

    class Never(io.BytesIO):
        def write(self, data: object) -> int:
            raise AssertionError

    with open_image(address) as opened, pytest.raises(WorkError, match="does not match its digest"):
        opened.write_tar(Never(), lambda name: True, None, {}, 0, lambda amount: None)


def bomb(packing: str, size: int) -> bytes:
    """Make a layer with one file of `size` zeros, compressed as far as possible."""
    begin = header(b"zeros", b"0", binary(size))
    if packing == "gzip":
        packer = zlib.compressobj(9, wbits=31)
        parts = [packer.compress(begin)]
        parts += [packer.compress(bytes(1 << 20)) for _ in range(size >> 20)]
        return b"".join([*parts, packer.compress(END), packer.flush()])
    frames = [zstandard.compress(begin), zstandard.compress(bytes(1 << 26)) * (size >> 26)]
    return b"".join(frames)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("packing", ["gzip", "zstd"])
def test_a_bomb(packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 1 << 28 if packing == "gzip" else 1 << 34
    if packing == "gzip":  # it cannot compress more than a thousandfold
        monkeypatch.setattr(limits, "RATIO", 200)
        monkeypatch.setattr(limits, "RATIO_FROM", 1 << 26)
    blob = bomb(packing, size)
    assert len(blob) < 2_000_000
    image = Image([b"other"], packing, blobs={0: blob})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    refused(archives.write(image, "oci", tmp_path / "oci"), "unpack to")
    assert time.monotonic() - start < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_names_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TREE", 1 << 20)
    wide = layer(*(file(f"{n}") for n in range(3000)))
    deep = layer(*(file(f"{n}/" + "d/" * 1000 + "x") for n in range(3)))
    hidden = layer(*(file(f".wh.{n}") for n in range(3000)))
    attributes = layer(
        *(file(f"{n}", pax_headers={"SCHILY.xattr.user.x": "x" * 9000}) for n in range(200))
    )
    for one in (wide, deep, hidden, attributes):
        refused(archives.write(Image([one]), "docker-archive", tmp_path / "a"), "names than fit")


def saved(tmp_path: Path, *members: archives.Member) -> str:
    """Make a docker archive with the layer's tar replaced by these members."""
    found = Image([ONE]).docker_members()
    (tmp_path / "image").write_bytes(archives.tar([found[0], *members, *found[2:]]))
    return f"docker-archive:{tmp_path}/image"


NAME = f"{0:064x}/layer.tar"


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([symlink(NAME, "layer.tar")], "form a loop"),
        ([symlink(NAME, "../a"), symlink("a", NAME)], "form a loop"),
        ([link(NAME, NAME)], "form a loop"),
        ([symlink(NAME, "/etc/passwd")], "is missing"),
        ([symlink(NAME, "../../../../etc/passwd")], "is missing"),
        ([link(NAME, "../x")], "leads out"),
        ([folder(NAME)], "is missing"),
        ([file(NAME, type=tarfile.FIFOTYPE)], "is missing"),
        ([file("../x"), file(NAME, ONE)], "leads out"),
        ([], "is missing"),
    ],
)
def test_links_in_an_archive(members: list[archives.Member], expected: str, tmp_path: Path) -> None:
    refused(saved(tmp_path, *members), expected)


@pytest.mark.parametrize("kind", ["oci-archive", "docker-archive"])
def test_archives_that_are_none(kind: str, tmp_path: Path) -> None:
    whole = Path(archives.write(Image([ONE]), kind, tmp_path / "whole").partition(":")[2])
    data = whole.read_bytes()
    place = tmp_path / "image"
    for content, expected, fault in [
        (b"", "has no", RequestError),
        (END, "has no", RequestError),
        (b"text\n" * 500, "invalid number|checksum", WorkError),
        (gzip.compress(data), "compressed with gzip", RequestError),
        (zstandard.compress(data), "compressed with zstd", RequestError),
        (data[: len(data) // 2], "middle of an entry", WorkError),
        (data[:700], "middle of an entry", WorkError),
        (header(b"a", b"0", binary(1 << 62)) + data, "middle of an entry", WorkError),
        (archives.tar([file("x")]), "has no", RequestError),
    ]:
        place.write_bytes(content)
        refused(f"{kind}:{place}", expected, fault)


def test_an_archive_of_too_many_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MEMBERS", 5)
    address = archives.write(Image([ONE]), "oci-archive", tmp_path / "a")
    archives.output(address)
    monkeypatch.setattr(limits, "MEMBERS", 4)
    refused(address, "more than 4 members")


@pytest.mark.parametrize(
    "address",
    [
        *("oci:", "oci", "docker-archive:", "tar:/x", "oci:\0", "oci:/no/such", "oci:/dev/null"),
        *("oci-archive:/no:tag", "oci-archive:/dev/null", "docker-archive:/", "oci:/", "oci::::"),
        "oci:" + "x" * 5000,
    ],
)
def test_addresses_of_nothing(address: str) -> None:
    with pytest.raises(RequestError), open_image(address):
        pass


@pytest.mark.timeout(10)
def test_an_archive_that_is_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    refused(f"docker-archive:{tmp_path}/fifo", "not a regular file", RequestError)


@pytest.mark.timeout(10)
def test_blobs_that_are_links(tmp_path: Path) -> None:
    image = Image([ONE])
    place = tmp_path / "oci"
    address = archives.write(image, "oci", place)
    expected = archives.output(address)
    blob = place / "blobs/sha256" / archives.sha256(ONE)[7:]
    blob.rename(place / "layer")
    blob.symlink_to("../../layer")
    assert archives.output(address) == expected
    (place / "layer").rename(tmp_path / "layer")
    blob.unlink()
    blob.symlink_to("../../../layer")
    refused(address, "leads out of the folder")
    for target, fault, words in [
        (str(tmp_path / "layer"), WorkError, "leads out of the folder"),
        (blob.name, WorkError, "cannot be read"),
        ("nowhere", WorkError, "is missing"),
    ]:
        blob.unlink()
        blob.symlink_to(target)
        refused(address, words, fault)
    blob.unlink()
    os.mkfifo(blob)
    refused(address, "not a regular file", SqshforgeError)


def test_an_archive_that_is_written_to_meanwhile(tmp_path: Path) -> None:
    address = archives.write(Image([ONE]), "docker-archive", tmp_path / "image")

    def touch(amount: float) -> None:
        os.utime(tmp_path / "image", (1, 1))

    with pytest.raises(WorkError, match="changed while"):
        archives.output(address, advance=touch)
