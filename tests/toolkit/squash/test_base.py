"""The cache of bases: what it saves, and that it does not change the result."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sqshforge.engine.daemon import Daemon
from sqshforge.host import files
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.image import address
from sqshforge.squash import pack as squash
from sqshforge.squash import request as record
from sqshforge.squash.cache import Cache
from tests.support import odd_root
from tests.support.engines import CLIENT, Unmounted
from tests.support.engines import docker_fixture as docker_fixture
from tests.support.engines import docker_host_fixture as docker_host_fixture
from tests.support.engines import storage_fixture as storage_fixture

FAST = squash.Options.of("fast")
DOCKERFILE = """\
FROM scratch
ADD rootfs.tar /
ENV WHO=base
COPY meta/ /sqshforge/meta/
COPY training/ /sqshforge/training/
LABEL io.sqshforge.inputs={label}
"""


class Said(Reporter):
    """A reporter that remembers its lines."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@dataclass
class Desk:
    """A folder that images are built from, in one of the engines, and a cache of bases."""

    folder: Path
    engine: str

    @property
    def context(self) -> Path:
        return self.folder / "context"

    @property
    def cache(self) -> Cache:
        return Cache(self.folder / "cache", limit=1 << 30)

    def build(self, code: str, dockerfile: str = DOCKERFILE, tag: str = "1") -> address.Source:
        """Build an image with this training code."""
        (self.context / "training/train.py").write_text(code)
        (self.context / "Dockerfile").write_text(dockerfile.format(label=digest_of(code)))
        argv: list[str | Path] = [CLIENT, "build", "--network", "host"]
        if self.engine == "buildah":
            argv = ["buildah", "build", "--isolation", "chroot", "--layers"]
        name = f"localhost/sqshforge-base:{tag}"
        Programs().capture([*argv, "--tag", name, self.context], env={"DOCKER_BUILDKIT": "1"})
        if self.engine == "unmounted":
            return Unmounted(name, Programs())
        scheme = "buildah" if self.engine == "buildah" else "dockerd"
        return address.parse(f"{scheme}://{name}", Programs())

    def pack(
        self,
        image: address.Source,
        name: str = "a.sqsh",
        *,
        options: squash.Options = FAST,
        cached: bool = True,
    ) -> tuple[Path, str]:
        """Pack an image; returns the file, and what was reported meanwhile."""
        said, cache = Said(), self.cache if cached else None
        packed = squash.pack(image, self.folder / name, options, Programs(), said, cache)
        return packed.path, "\n".join(said.lines)

    def found(self, path: Path) -> dict[str, odd_root.Entry]:
        """Return the entries of a squash file."""
        return odd_root.unpacked(path, path.with_suffix(f".tree{time.monotonic_ns()}"))


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture(params=["docker", "unmounted", "buildah"])
def desk(
    request: pytest.FixtureRequest, docker: str, storage: None, tmp_path: Path
) -> Iterator[Desk]:
    made = Desk(tmp_path, request.param)
    for name in ("meta", "training"):
        (made.context / name).mkdir(parents=True)
    (made.context / "meta/recipe.yaml").write_text("target: x\n")
    (made.context / "training/tool").write_text("#!/bin/sh\n")
    (made.context / "training/tool").chmod(0o755)
    odd_root.tar(odd_root.make(tmp_path / "tree"), made.context / "rootfs.tar")
    yield made
    Programs().attempt(["buildah", "rmi", "--all", "--force"])


# Tests that do not depend on the engine use only one.
by_docker = pytest.mark.parametrize("desk", ["docker"], indirect=True)
ARCHIVES = ("oci", "oci-archive", "docker-archive")
FROM_CACHE = "all but /sqshforge comes from the cache of bases"


@pytest.mark.processes
def test_after_an_edit_the_base_is_not_packed_again(desk: Desk) -> None:
    _, first = desk.pack(desk.build("one"))
    assert FROM_CACHE not in first
    path, second = desk.pack(desk.build("two"))
    assert FROM_CACHE in second
    assert len(desk.cache.bases()) == 1
    asked = Programs().capture(["unsquashfs", "-cat", path, "sqshforge/training/train.py"])
    assert asked == "two"


@pytest.mark.processes
def test_after_an_edit_the_bytes_are_those_of_a_cold_pack(desk: Desk) -> None:
    desk.pack(desk.build("one"))
    image = desk.build("two")
    warm, said = desk.pack(image, "warm.sqsh")
    assert FROM_CACHE in said
    cold, _ = desk.pack(image, "cold.sqsh", cached=False)
    desk.cache.prune(0)
    fresh, said = desk.pack(image, "fresh.sqsh", options=replace(FAST, jobs=1))
    assert FROM_CACHE not in said
    assert warm.read_bytes() == cold.read_bytes() == fresh.read_bytes()
    assert desk.found(warm) == desk.found(cold)


def ways(image: address.Source, engine: str, folder: Path) -> dict[str, address.Source]:
    """Return an image as mounted, and as archived by its engine."""
    folder.mkdir()
    assert isinstance(image, address.Dockerd | address.Storage)
    if engine != "buildah":
        Programs().capture([CLIENT, "save", "--output", folder / "saved", image.name])
        saved = address.parse(f"docker-archive:{folder / 'saved'}", Programs())
        return {"mounted": image, "unmounted": Unmounted(image.name, Programs()), "saved": saved}
    found = {kind: f"{kind}:{folder / kind}" for kind in ARCHIVES}
    for one in found.values():
        Programs().capture(["buildah", "push", "--quiet", image.name, f"{one}:odd:1"])
    return {"mounted": image, **{k: address.parse(v, Programs()) for k, v in found.items()}}


@pytest.mark.processes
@pytest.mark.parametrize("desk", ["docker", "buildah"], indirect=True)
def test_whichever_way_an_image_is_read_its_file_is_the_same(desk: Desk) -> None:
    """Both cold, and with a base that was kept from a predecessor read in any other way."""
    dockerfile = DOCKERFILE.replace("COPY training/", "COPY over/ /data/\nCOPY training/")
    (desk.context / "over/sub").mkdir(parents=True)
    for name, count in {"one": 200_000, "sub/late": 10, "a-file": 300_000}.items():
        (desk.context / "over" / name).write_bytes(random.Random(count).randbytes(count))
    before = ways(desk.build("one", dockerfile), desk.engine, desk.folder / "before")
    after = ways(desk.build("two", dockerfile, "2"), desk.engine, desk.folder / "after")
    cold = {
        way: files.digest(desk.pack(image, f"{way}.sqsh", cached=False)[0], jobs=1)
        for way, image in after.items()
    }
    assert len(set(cold.values())) == 1, cold
    for first, image in before.items():
        desk.pack(image, f"{first}-before.sqsh")
        for way, edited in after.items():
            path, said = desk.pack(edited, f"{way}-after-{first}.sqsh")
            assert FROM_CACHE in said, (first, way)
            assert files.digest(path, jobs=1) == cold[way], (first, way)
        desk.cache.prune(0)


def large(place: Path) -> None:
    (place / "large").write_bytes(bytes(32 << 20))


def device(place: Path) -> None:
    with tarfile.open(place.parent / "device.tar", "w") as tar:
        one = tarfile.TarInfo("sqshforge/null")
        one.type, one.devmajor, one.devminor = tarfile.CHRTYPE, 1, 3
        tar.addfile(one)


@pytest.mark.processes
@pytest.mark.parametrize("desk", ["docker", "buildah"], indirect=True)
@pytest.mark.parametrize("fill", [large, device])
def test_a_folder_that_is_not_packed_apart_is_so_whichever_way_it_is_read(
    desk: Desk, fill: Callable[[Path], None]
) -> None:
    (desk.context / "added").mkdir()
    fill(desk.context / "added")
    is_tar = (desk.context / "device.tar").exists()
    dockerfile = DOCKERFILE + ("ADD device.tar /\n" if is_tar else "COPY added/ /sqshforge/\n")
    read = ways(desk.build("one", dockerfile), desk.engine, desk.folder / "ways")
    found = {
        way: files.digest(desk.pack(image, f"{way}.sqsh")[0], 1) for way, image in read.items()
    }
    assert len(set(found.values())) == 1, found
    assert desk.cache.bases() == []


@pytest.mark.processes
def test_the_record_of_an_edit_is_that_of_the_file(desk: Desk) -> None:
    desk.pack(desk.build("one"))
    path, _ = desk.pack(desk.build("two"))
    facts = record.read_record(path)
    assert facts is not None
    assert facts["digest"] == files.digest(path, jobs=1)
    assert facts["base"] == f"sha256:{desk.cache.bases()[0].path.stem}"
    assert facts["image"]["env"][-1] == "WHO=base"


def inside(place: Path, **files: str) -> None:
    """Write inside.tar, which an image unpacks by a step that does not say where its files go."""
    with tarfile.open(place / "inside.tar", "w") as tar:
        for name, text in files.items():
            one = tarfile.TarInfo(name.replace("__", "/"))
            one.size = len(text)
            tar.addfile(one, io.BytesIO(text.encode()))


@pytest.mark.processes
@pytest.mark.parametrize("desk", ["unmounted"], indirect=True)
def test_a_step_that_was_seen_to_stay_within_sqshforge_is_not_saved_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the RUN that writes the list of packages: docker's history does not say what it wrote."""
    dockerfile = DOCKERFILE.replace("COPY training/", "ADD inside.tar /\nCOPY training/")
    inside(desk.context, sqshforge__list="packages")
    desk.pack(desk.build("one", dockerfile))
    image = desk.build("two", dockerfile)
    with monkeypatch.context() as patch:
        patch.setattr(Daemon, "save", lambda *_: pytest.fail("the image is saved"))
        warm, said = desk.pack(image)
    assert FROM_CACHE in said
    cold, _ = desk.pack(image, "cold.sqsh", cached=False)
    assert warm.read_bytes() == cold.read_bytes()
    # Another content of that step may be anywhere.
    inside(desk.context, sqshforge__list="packages", opt__new="new")
    path, said = desk.pack(desk.build("three", dockerfile))
    assert FROM_CACHE not in said
    assert Programs().capture(["unsquashfs", "-cat", path, "opt/new"]) == "new"


@pytest.mark.processes
@pytest.mark.parametrize("desk", ["unmounted"], indirect=True)
@pytest.mark.parametrize("layers", [None, 3, ["x", 4], [[]], "sha256:1"])
def test_a_record_with_other_layers_says_nothing_of_a_base(desk: Desk, layers: object) -> None:
    dockerfile = DOCKERFILE.replace("COPY training/", "ADD inside.tar /\nCOPY training/")
    inside(desk.context, sqshforge__list="packages")
    path, _ = desk.pack(desk.build("one", dockerfile))
    facts = record.read_record(path)
    assert facts is not None
    facts["image"]["layers"] = layers
    record.record_path(path).write_text(json.dumps(facts))
    _, said = desk.pack(desk.build("two", dockerfile))
    assert FROM_CACHE in said  # it was saved, and its own layers were read


@pytest.mark.processes
@pytest.mark.parametrize(
    "dockerfile",
    [
        DOCKERFILE + "COPY training/ /elsewhere/\n",
        DOCKERFILE.replace("WHO=base", "WHO=else"),
        DOCKERFILE.replace("COPY meta/ /sqshforge/meta/", "COPY meta/ /meta/"),
    ],
)
def test_a_change_outside_is_packed_whole_and_said(desk: Desk, dockerfile: str) -> None:
    desk.pack(desk.build("one"))
    path, said = desk.pack(desk.build("two", dockerfile))
    assert FROM_CACHE not in said
    assert "changed outside of /sqshforge: all is packed anew" in said
    cold, _ = desk.pack(desk.build("two", dockerfile), "cold.sqsh", cached=False)
    assert path.read_bytes() == cold.read_bytes()


@pytest.mark.processes
@pytest.mark.parametrize(
    "end",
    [
        "FROM scratch\nADD rootfs.tar /\nCOPY training/train.py /sqshforge\n",
        "FROM scratch\nADD rootfs.tar /\n",
        "FROM scratch\nADD rootfs.tar /\nCOPY training/ /usr/x/\nCOPY link /\n",
    ],
)
def test_an_image_without_the_folder_is_packed_too(desk: Desk, end: str) -> None:
    (desk.context / "link").mkdir()
    (desk.context / "link/sqshforge").symlink_to("usr/x")
    path, _ = desk.pack(desk.build("one", end))
    assert desk.cache.bases() == []
    assert ("sqshforge" in desk.found(path)) == ("COPY" in end)


@pytest.mark.processes
def test_without_a_cache_none_is_made(desk: Desk) -> None:
    desk.pack(desk.build("one"), cached=False)
    assert not desk.cache.folder.exists()


def spoil(base: Path) -> None:
    with base.open("r+b") as file:
        file.seek(base.stat().st_size // 2)
        file.write(b"spoiled")


def cut(base: Path) -> None:
    os.truncate(base, 1000)


def forget(base: Path) -> None:
    base.with_name(f"{base.name}.json").write_text("{")


@pytest.mark.processes
@by_docker
@pytest.mark.parametrize("damage", [spoil, cut, forget, Path.unlink])
def test_a_base_that_is_not_what_was_written_is_not_used(
    desk: Desk, damage: Callable[[Path], None]
) -> None:
    whole, _ = desk.pack(desk.build("one"))
    before = whole.read_bytes()
    damage(desk.cache.bases()[0].path)
    again, said = desk.pack(desk.build("one"), options=replace(FAST, force=True))
    assert FROM_CACHE not in said
    assert again.read_bytes() == before
    assert len(desk.cache.bases()) == 1


@pytest.mark.processes
@by_docker
def test_a_cache_on_a_full_disk_is_no_hindrance(desk: Desk) -> None:
    image = desk.build("one")
    place = desk.folder / "cache"
    place.mkdir()
    Programs().capture(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place])
    try:
        path, said = desk.pack(image)
        assert "no base is kept for the next pack" in said and "No space left" in said
        assert path.exists() and desk.cache.bases() == []
    finally:
        Programs().capture(["umount", place])


@pytest.mark.processes
@by_docker
def test_a_cache_on_another_disk_holds_a_copy(desk: Desk) -> None:
    place = desk.folder / "cache"
    place.mkdir()
    Programs().capture(["mount", "-t", "tmpfs", "tmpfs", place])
    try:
        desk.pack(desk.build("one"))
        path, said = desk.pack(desk.build("two"))
        assert FROM_CACHE in said
        cold, _ = desk.pack(desk.build("two"), "cold.sqsh", cached=False)
        assert path.read_bytes() == cold.read_bytes()
    finally:
        Programs().capture(["umount", place])


@pytest.mark.processes
@by_docker
def test_a_cache_that_cannot_be_made_is_no_hindrance(desk: Desk) -> None:
    (desk.folder / "cache").write_text("a file")
    path, said = desk.pack(desk.build("one"))
    assert "no base is kept for the next pack" in said
    assert path.exists()
