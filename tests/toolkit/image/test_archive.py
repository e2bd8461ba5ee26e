"""Images from archives of every kind, changed as enroot does.

test_archive_layers tests how layers merge, test_archive_hostile faulty archives.
"""

from __future__ import annotations

import gzip
import io
import itertools
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sqshforge.host.programs import Programs
from sqshforge.image.archive.image import open_image
from tests.support import archives
from tests.support.archives import (
    EPOCH,
    FILES,
    KINDS,
    MORE,
    PLAIN,
    Image,
    file,
    folder,
    layer,
    link,
    merged,
    symlink,
)


def test_every_kind_and_packing_gives_the_same_bytes(tmp_path: Path) -> None:
    found = set()
    for number, (kind, packing) in enumerate(itertools.product(KINDS, archives.PACKINGS)):
        image = Image([PLAIN, MORE], packing)
        address = archives.write(image, kind, tmp_path / str(number))
        with open_image(address) as opened:
            found.add((archives.output(address), opened.digest, opened.diff_ids))
            assert opened.config["config"]["Cmd"] == ["/bin/sh"]
            assert opened.size > 0
    assert len(found) == 1
    data, digest, diff_ids = found.pop()
    assert digest == archives.sha256(image.config_bytes())
    assert diff_ids == (archives.sha256(PLAIN), archives.sha256(MORE))
    assert archives.shape(archives.parsed(data)) == {
        "bin": "folder",
        "bin/sh": "other",
        **archives.SUPPLIED,
        "etc": "folder",
        "etc/environment": "A=1\n",
        "etc/rc": "#!/bin/sh\n",
        "sqshforge": "folder",
        "sqshforge/a": "",
    }


def written(place: Path, *layers: bytes, **options: Any) -> archives.Tree:
    address = archives.write(Image(layers), "docker-archive", place / "image.tar")
    return archives.parsed(archives.output(address, **options))


def test_modes_are_widened_and_owners_are_root(tmp_path: Path) -> None:
    modes = {0o000: 0o400, 0o4755: 0o4755, 0o2111: 0o2511, 0o1644: 0o1644}
    members = [file(f"f{mode}", b"x", mode=mode, uid=7, uname="seven") for mode in modes]
    found = written(tmp_path, layer(*members, folder("d0", 0), folder("d555", 0o555)))
    assert {mode: found[f"f{mode}"][0].mode for mode in modes} == modes
    assert [found[name][0].mode for name in ("d0", "d555")] == [0o700, 0o755]
    assert all((m.uid, m.gid, m.uname) == (0, 0, "") for m, _ in found.values())


def test_devices_and_the_marker_are_left_out(tmp_path: Path) -> None:
    names = ["dev/null", ".dockerenv", "usr/dev/kept", "a/.dockerenv", "device"]
    found = merged(tmp_path, layer(*map(file, names), folder("dev/pts"), link("kept", "dev/null")))
    assert found == {
        "a": "folder",
        "a/.dockerenv": "",
        "dev": "folder",
        "device": "",
        "kept": "",
        "usr": "folder",
        "usr/dev": "folder",
        "usr/dev/kept": "",
    }


@pytest.mark.parametrize("name", archives.HOMES)
def test_the_files_of_enroot_replace_what_is_there(name: str, tmp_path: Path) -> None:
    members, home = archives.HOMES[name]
    found = written(tmp_path, layer(*members))
    for path, data in FILES.items():
        member, content = found.pop(home + path.removeprefix("etc"))
        assert member.isreg()
        assert (content, member.mode, member.uid, member.mtime) == (data, 0o644, 0, EPOCH)
    assert not any(one.startswith((f"{home}/rc", f"{home}/environment")) for one in found)
    assert found[home][0].isdir() and found[home][0].mtime == EPOCH
    if name == "a folder":
        assert found["etc"][0].mode == 0o711 and "etc/x" in found


def test_names_of_any_bytes_and_length_and_times_pass(tmp_path: Path) -> None:
    names = ["caf\udce9", "two  words ", "n" * 250, "d/" * 60 + "deep", "new\nline", "\u0416" * 60]
    members = [file(name, b"x", mtime=EPOCH + 0.75) for name in names]
    members += [symlink("l" * 200, "t" * 300), link("h" * 150, "n" * 250)]
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        found = written(tmp_path, layer(*members, form=form))
        assert {*names, "l" * 200, "h" * 150} - {"n" * 250} <= set(found)
        assert found["l" * 200][0].linkname == "t" * 300
        assert found["n" * 250][0].linkname == "h" * 150
        assert all(found[name][0].mtime == EPOCH for name in names if name != "n" * 250)


def test_a_part_of_the_tree(tmp_path: Path) -> None:
    def in_tail(name: bytes) -> bool:
        return name.split(b"/")[0] == b"sqshforge"

    layers = (PLAIN, MORE, layer(link("sqshforge/sh", "bin/sh"), file("sqshforge.not", b"")))
    tail = merged(tmp_path, *layers, keep=in_tail)
    assert tail == {"sqshforge": "folder", "sqshforge/a": "", "sqshforge/sh": "other"}
    base = merged(tmp_path, *layers, keep=lambda name: not in_tail(name))
    assert base == {"bin": "folder", "bin/sh": "other", "sqshforge.not": ""}
    assert merged(tmp_path, *layers, layers=1) == {
        "bin": "folder",
        "bin/sh": "shell",
        "sh": "-> bin/sh",
    }


def test_one_image_is_written_several_times(tmp_path: Path) -> None:
    address = archives.write(Image([PLAIN, MORE], "gzip"), "oci", tmp_path / "oci")
    with open_image(address) as image:
        found = []
        for count in (1, None, 1, 2, None):
            out = io.BytesIO()
            image.write_tar(out, lambda name: True, count, FILES, EPOCH, lambda amount: None)
            found.append(out.getvalue())
    assert found[0] == found[2] != found[1] == found[3] == found[4]


ATTRIBUTES = {
    "SCHILY.xattr.user.note": "two\nlines=",
    "SCHILY.xattr.trusted.overlay.opaque": "y",
    "SCHILY.xattr.system.posix_acl_access": "x",
}


def test_attributes_are_dropped_or_kept(tmp_path: Path) -> None:
    name = "n" * 150
    member = file(name, b"content", pax_headers=dict(ATTRIBUTES))
    assert written(tmp_path, layer(member))[name][0].pax_headers == {}
    found, content = written(tmp_path, layer(member), xattrs=True)[name]
    assert content == b"content"
    assert found.pax_headers == {"SCHILY.xattr.user.note": "two\nlines=", "path": name}


@pytest.mark.processes
@pytest.mark.parametrize("form", ["gnu", "posix0.0", "posix0.1", "posix1.0"])
@pytest.mark.parametrize("pieces", [1, 3, 200])
def test_a_sparse_file_comes_out_whole(form: str, pieces: int, tmp_path: Path) -> None:
    with (tmp_path / "holes").open("wb") as made:
        for number in range(pieces):
            made.seek((2 * number + 1) << 14)
            made.write(b"%d" % number)
        made.truncate(pieces << 16)
    option = (
        ["--format=gnu"] if form == "gnu" else ["--format=posix", f"--sparse-version={form[5:]}"]
    )
    argv: list[str | Path] = [
        "tar",
        "--sparse",
        *option,
        "-cf",
        tmp_path / "tar",
        "-C",
        tmp_path,
        "holes",
    ]
    Programs().capture(argv)
    stored = (tmp_path / "tar").read_bytes()
    assert len(stored) < pieces << 15
    member, content = written(tmp_path, stored)["holes"]
    assert content == (tmp_path / "holes").read_bytes()
    assert member.type == tarfile.REGTYPE


def test_all_the_ways_to_compress(tmp_path: Path) -> None:
    half = len(PLAIN) // 2
    parts = PLAIN[:half], PLAIN[half:]
    skipped = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    ways = [
        b"".join(map(gzip.compress, parts)),
        gzip.compress(PLAIN) + bytes(100),
        b"".join(map(zstandard.compress, parts)),
        skipped + zstandard.compress(PLAIN),
        zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress(PLAIN),
    ]
    expected = merged(tmp_path, PLAIN)
    for blob in ways:
        image = archives.with_layer(Image([PLAIN], "gzip"), 0, blob)
        address = archives.write(image, "oci-archive", tmp_path / "oci.tar")
        assert archives.shape(archives.parsed(archives.output(address, files={}))) == expected


def test_the_bytes_are_reported_once(tmp_path: Path) -> None:
    address = archives.write(Image([layer(file("a", bytes(5_000_000)))]), "oci", tmp_path / "oci")
    shown: list[float] = []
    archives.output(address, advance=shown.append)
    assert sum(shown) == pytest.approx(5_000_000, rel=0.01)
    assert len(shown) > 4


def test_a_writer_that_takes_little_at_once_gets_all(tmp_path: Path) -> None:
    class Slow(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[:1000])

    address = archives.write(Image([PLAIN, MORE]), "oci", tmp_path / "oci")
    out = Slow()
    with open_image(address) as image:
        image.write_tar(out, lambda name: True, None, FILES, EPOCH, lambda amount: None)
    assert out.getvalue() == archives.output(address)


@pytest.mark.processes
@pytest.mark.root  # needed to unpack a device
def test_mksquashfs_reads_it(tmp_path: Path) -> None:
    one = layer(
        folder("d", 0o1777),
        file("d/z", b"content" * 1000, mode=0o4755),
        link("d/a", "d/z"),
        symlink("l", "x" * 200),
        link("l2", "l"),
        file("n" * 200, b"long"),
        file("pipe", type=tarfile.FIFOTYPE),
        file("c", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
        file("caf\udce9", b"e", pax_headers={"SCHILY.xattr.user.note": "kept"}),
    )
    data = archives.output(
        archives.write(Image([one]), "docker-archive", tmp_path / "tar"), xattrs=True
    )
    argv = ["mksquashfs", "-", str(tmp_path / "sqsh"), "-tar", "-no-progress", "-quiet"]
    subprocess.run(argv, input=data, check=True, timeout=60, capture_output=True)
    Programs().capture(["unsquashfs", "-d", tmp_path / "root", tmp_path / "sqsh"])
    root = tmp_path / "root"
    assert (root / "d/a").stat().st_ino == (root / "d/z").stat().st_ino
    assert (root / "d/a").stat().st_mode & 0o7777 == 0o4755
    assert (root / "d").stat().st_mode & 0o7777 == 0o1777
    assert (root / "l2").readlink() == Path("x" * 200)
    assert (root / ("n" * 200)).read_bytes() == b"long"
    assert (root / "pipe").is_fifo() and (root / "c").is_char_device()
    assert os.getxattr(root / "caf\udce9", "user.note") == b"kept"
