"""A disk too full for a squash file: noticed before the work, or reported when it fills up."""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sqshforge.errors import MissingError
from sqshforge.host.programs import Programs
from sqshforge.image.address import Rootfs
from sqshforge.image.enroot import ImageConfig
from sqshforge.squash import pack as squash
from tests.support import archives
from tests.support.packing import FAST, QUIET, run, visible
from tests.support.packing import image_fixture as image_fixture
from tests.support.packing import tree_fixture as tree_fixture

pytestmark = pytest.mark.processes


@pytest.fixture
def small_disk(as_root: None, tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    Programs().capture(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place])
    try:
        yield place
    finally:
        Programs().capture(["umount", "--lazy", place])


@pytest.mark.parametrize("kind", ["image", "folder"])
def test_a_disk_too_small_is_noticed_before_the_work(
    kind: str, image: str, tree: Path, small_disk: Path
) -> None:
    address = {"image": image, "folder": f"rootfs:{tree}"}[kind]
    done = run(address, "-o", small_disk / "a.sqsh")
    assert done.returncode == 3
    assert re.search(r"needs [\d,]{10,} bytes .* [\d,]{9,} are missing", done.stderr)
    assert f"where: {small_disk}" in done.stderr
    assert visible(small_disk) == set()


def test_the_bytes_missing_are_named(tree: Path, tmp_path: Path) -> None:
    class Huge(Rootfs):
        def config(self) -> ImageConfig:
            return replace(super().config(), size=10**18)

    with pytest.raises(MissingError, match="needs 500,000,000,000,000,000 bytes") as caught:
        squash.pack(Huge(tree), tmp_path / "a.sqsh", FAST, Programs(), QUIET)
    assert caught.value.where == str(tmp_path)
    assert visible(tmp_path) == set()


def unsqueezable(place: Path, code: bytes) -> str:
    """Make an archive of 12 MiB, half of which seems enough, with a /sqshforge; its address."""
    data = random.Random(1).randbytes(12 << 20)
    files = [archives.file("data/one", data[: 6 << 20]), archives.file("data/two", data[6 << 20 :])]
    top = [archives.folder("sqshforge"), archives.file("sqshforge/train.py", code)]
    layers = [archives.layer(archives.folder("etc"), *files), archives.layer(*top)]
    return archives.write(archives.Image(layers), "oci-archive", place)


@pytest.mark.parametrize("kind", ["folder", "stream", "from the cache"])
def test_a_disk_that_fills_up_in_the_middle(
    kind: str, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either mksquashfs fills it, or the copy of a base."""
    monkeypatch.setenv("SQSHFORGE_CACHE", str(tmp_path / "cache"))
    address = unsqueezable(tmp_path / "one.tar", b"one")
    if kind == "folder":
        (tmp_path / "tree/etc").mkdir(parents=True)
        (tmp_path / "tree/data").write_bytes(random.Random(1).randbytes(12 << 20))
        address = f"rootfs:{tmp_path}/tree"
    if kind == "from the cache":
        kept = run(address, "-o", tmp_path / "a.sqsh", "--profile", "fast")
        assert kept.returncode == 0, kept.stderr
        address = unsqueezable(tmp_path / "two.tar", b"two")
    done = run(address, "-o", small_disk / "a.sqsh", "--profile", "fast")
    assert done.returncode == 3, done.stderr
    assert re.search(
        r"error: No space left on device while packing a\.sqsh: "
        r"it may take up to 12,\d{3},\d{3} bytes \(12\.\d MB\), 8,\d{3},\d{3} are free",
        done.stderr,
    )
    assert f"where: {small_disk}\n" in done.stderr and "fix:   free " in done.stderr
    assert visible(small_disk) == set()


def test_a_folder_of_temporary_files_that_is_full(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the full folder, not the output's."""
    monkeypatch.setattr(squash, "pack_whole", lambda *anything: fill(small_disk))
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    (tmp_path / "tree/etc").mkdir(parents=True)
    with pytest.raises(MissingError, match="No space left on device") as caught:
        squash.pack(Rootfs(tmp_path / "tree"), tmp_path / "a.sqsh", FAST, Programs(), QUIET)
    assert caught.value.where == str(small_disk)


def fill(folder: Path) -> None:
    with (folder / "rest").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 20)):
            pass
