"""Hot files first: whichever way an image is read, and with a base from the cache."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sqshforge.host import files
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.hot import HotList
from sqshforge.image import address
from sqshforge.squash import pack as squash
from sqshforge.squash import request as record
from sqshforge.squash.cache import Cache
from sqshforge.squashfs import hot_note
from sqshforge.squashfs.hot_note import HotRange
from sqshforge.squashfs.image import open_image
from tests.support import odd_root
from tests.support.engines import CLIENT, Unmounted, storage
from tests.support.engines import docker_fixture as docker_fixture
from tests.support.engines import docker_host_fixture as docker_host_fixture

FAST = squash.Options.of("fast")
CHANCE = random.Random(5)
# The third name of a file; names that need backslashes in a sort file; enroot's own; a link.
LIST = HotList.of(
    [
        *("data/sub/three", "usr/dev/kept", "names/two  spaces ", "names/back\\slash", "etc/rc"),
        *("lib/third-name", "gone", "lib/absolute", "bin/passwd", "some/z", "dir-300/inside"),
    ]
)
DOCKERFILE = """\
FROM scratch
ADD rootfs.tar /
COPY some/ /some/
COPY training/ /sqshforge/training/
LABEL io.sqshforge.target=a-target
"""
BLOCK = 128 << 10  # bytes per block of the profile
ARCHIVES = ("oci", "oci-archive", "docker-archive")


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("context")
    for name in ("some/sub", "training"):
        (place / name).mkdir(parents=True)
    for name in ("a", "sub/late", "z", "zz"):
        (place / "some" / name).write_bytes(CHANCE.randbytes(300_000))
    (place / "training/train.py").write_text("one")
    odd_root.tar(odd_root.make(place / "tree"), place / "rootfs.tar")
    (place / ".dockerignore").write_text("tree\n")
    (place / "Dockerfile").write_text(DOCKERFILE)
    return place


@pytest.fixture(scope="module")
def in_buildah(context: Path) -> Iterator[str]:
    with odd_root.in_buildah(context) as name:
        yield name


@pytest.fixture(scope="module")
def image(in_buildah: str) -> address.Source:
    return address.parse(f"buildah://{in_buildah}", Programs())


def pack(
    image: address.Source, output: Path, hot: HotList = LIST, cache: Cache | None = None
) -> tuple[Path, str]:
    """Pack an image; returns the file and its key."""
    options = replace(FAST, hot=hot)
    packed = squash.pack(image, output, options, Programs(), Reporter(quiet=True), cache)
    return packed.path, packed.key


def starts(path: Path) -> dict[bytes, int]:
    """Return where the content of each file larger than a block begins."""
    with open_image(path) as opened:
        return {
            name: entry.inode.data.start
            for name, entry in opened.entries.items()
            if entry.inode.data.blocks
        }


@pytest.mark.processes
@pytest.mark.root
def test_whichever_way_buildah_s_image_is_read_its_bytes_are_the_same(
    in_buildah: str, image: address.Source, tmp_path: Path
) -> None:
    found = {"mounted": files.digest(pack(image, tmp_path / "mounted.sqsh")[0], 1)}
    for kind in ARCHIVES:
        place = f"{kind}:{tmp_path / kind}"
        Programs().capture(["buildah", "push", "--quiet", in_buildah, f"{place}:odd:1"])
        archived = address.parse(place, Programs())
        found[kind] = files.digest(pack(archived, tmp_path / f"{kind}.sqsh")[0], 1)
    assert len(set(found.values())) == 1, found
    plain, _ = pack(image, tmp_path / "plain.sqsh", hot=HotList())
    assert odd_root.unpacked(plain, tmp_path / "tree") == odd_root.unpacked(
        tmp_path / "mounted.sqsh", tmp_path / "again"
    )


@pytest.mark.processes
@pytest.mark.root
def test_whichever_way_docker_s_image_is_read_its_bytes_are_the_same(
    context: Path, docker: str, tmp_path: Path
) -> None:
    name = odd_root.in_docker(context, docker)
    Programs().capture([CLIENT, "save", "--output", tmp_path / "saved", name])
    ways = {
        "mounted": address.parse(f"dockerd://{name}", Programs()),
        "unmounted": Unmounted(name, Programs()),
        "saved": address.parse(f"docker-archive:{tmp_path / 'saved'}", Programs()),
    }
    found = {
        way: files.digest(pack(one, tmp_path / f"{way}.sqsh")[0], 1) for way, one in ways.items()
    }
    assert len(set(found.values())) == 1, found


@pytest.mark.processes
@pytest.mark.root
def test_listed_files_come_first_and_the_others_as_in_a_walk(
    image: address.Source, tmp_path: Path
) -> None:
    path, _ = pack(image, tmp_path / "a.sqsh", HotList.of(["some/z", "some/sub/late"]))
    found = starts(path)
    order = sorted(found, key=lambda name: (found[name], name))
    assert order[:2] == [b"some/z", b"some/sub/late"]
    data = [b"data/hole", b"data/one", b"data/sub/three", b"data/two", b"data/zeros"]
    assert order[2:] == [*data, b"some/a", b"some/zz"]


@pytest.mark.processes
@pytest.mark.root
def test_the_file_and_its_record_tell_where_they_lie(image: address.Source, tmp_path: Path) -> None:
    path, _ = pack(image, tmp_path / "a.sqsh", HotList.of(["some/z"]))
    facts = record.read_record(path)
    assert facts is not None
    hot = HotRange(**facts["hot"])
    with open_image(path) as opened, path.open("rb") as file:
        assert hot_note.noted(file, opened.superblock.used) == hot
    # Its tail shares a block with others, behind them.
    assert hot.offset == starts(path)[b"some/z"] == min(starts(path).values())
    assert 2 * BLOCK <= hot.length < 4 * BLOCK
    plain, _ = pack(image, tmp_path / "b.sqsh", HotList())
    facts = record.read_record(plain)
    assert facts is not None and facts["hot"] is None
    with open_image(plain) as opened, plain.open("rb") as file:
        assert hot_note.noted(file, opened.superblock.used) is None


@pytest.mark.processes
@pytest.mark.root
@pytest.mark.parametrize("name", ["some/gone", "some/z"])
def test_a_list_that_names_no_file_is_said(
    name: str, image: address.Source, tmp_path: Path
) -> None:
    said = io.StringIO()
    options = replace(FAST, hot=HotList.of([name]))
    squash.pack(image, tmp_path / "a.sqsh", options, Programs(), Reporter(said))
    warning = "no line of the list of hot files names a file of this image"
    assert (warning in said.getvalue()) == (name == "some/gone"), said.getvalue()


@pytest.mark.processes
@pytest.mark.root
def test_after_an_edit_the_bytes_are_those_of_a_cold_pack(context: Path, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", limit=1 << 30)
    argv = ["buildah", "build", "--isolation", "chroot", "--layers", "--tag", "localhost/hot:1"]
    packed = []
    (tmp_path / "storage").mkdir()
    with storage(tmp_path / "storage"):
        for code in ("one", "two"):
            (context / "training/train.py").write_text(code)
            Programs().capture([*argv, context])
            image = address.parse("buildah://localhost/hot:1", Programs())
            cold, _ = pack(image, tmp_path / "cold.sqsh")
            warm, _ = pack(image, tmp_path / "warm.sqsh", cache=cache)
            assert warm.read_bytes() == cold.read_bytes()
            packed.append((files.digest(warm, 1), record.read_record(warm)))
    assert len(cache.bases()) == 1
    (first, before), (second, after) = packed
    assert first != second and before is not None and after is not None
    assert before["base"] == after["base"] and before["hot"] == after["hot"]


@pytest.mark.processes
@pytest.mark.root
def test_another_list_is_another_file(image: address.Source, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", limit=1 << 30)
    lists = [LIST, HotList(), HotList(LIST.lines[::-1])]
    packed = [pack(image, tmp_path / "a.sqsh", one, cache)[1] for one in lists]
    assert len(set(packed)) == 3
    assert len(cache.bases()) == 3
