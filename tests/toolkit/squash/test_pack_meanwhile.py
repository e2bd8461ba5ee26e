"""An image whose name comes to mean another one, or none, while it is packed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sqshforge.errors import WorkError
from sqshforge.host import rootless
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.image import address as source
from sqshforge.image import enroot
from sqshforge.squash import pack as squash
from tests.support import odd_root
from tests.support.engines import CLIENT
from tests.support.engines import docker_fixture as docker_fixture
from tests.support.engines import docker_host_fixture as docker_host_fixture

pytestmark = pytest.mark.processes

QUIET = Reporter(quiet=True)
FAST = squash.Options.of("fast")


def pack(image: source.Source, address: str, output: Path) -> squash.Packed:
    programs = Programs()
    return rootless.call_as_root(
        lambda: squash.pack(image, output, FAST, programs, QUIET), address, programs
    )


@pytest.fixture
def another(tmp_path: Path) -> Path:
    """A folder that another image can be built from."""
    context = tmp_path / "another"
    (context / "tree/etc").mkdir(parents=True)
    (context / "tree/etc/another").write_text("another")
    odd_root.tar(context / "tree", context / "rootfs.tar")
    (context / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\nENV WHO=another\n")
    return context


def test_a_docker_image_is_packed_as_it_was_described(
    docker: str, another: Path, tmp_path: Path
) -> None:
    """Its name is moved to another image between reading its config and its layers."""
    context = tmp_path / "context"
    context.mkdir()
    odd_root.tar(odd_root.make(tmp_path / "tree"), context / "rootfs.tar")
    (context / "Dockerfile").write_text(odd_root.DOCKERFILE)

    name = "sqshforge-test-moved:1"

    def build(folder: Path) -> None:
        argv: list[str | Path] = [CLIENT, "build", "--network", "host", "--tag", name, folder]
        Programs().capture(argv, env={"DOCKER_BUILDKIT": "1"})

    class Rebuilt(source.Dockerd):
        def config(self) -> enroot.ImageConfig:
            described = super().config()
            build(another)
            return described

    build(context)
    image = Rebuilt(name, Programs())
    output = squash.pack(image, tmp_path / "a.sqsh", FAST, Programs(), QUIET).path
    found = odd_root.unpacked(output, tmp_path / "found")
    assert "data/one" in found and "etc/another" not in found
    assert "GREETING=" in (tmp_path / "found/etc/environment").read_text()


def test_a_buildah_image_is_packed_as_it_was_described(another: Path, tmp_path: Path) -> None:
    """Its name is moved to another image meanwhile."""

    class Rebuilt(source.Storage):
        def config(self) -> enroot.ImageConfig:
            described = super().config()
            (another / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\nENV WHO=third\n")
            (another / "tree/etc/another").write_text("third")
            odd_root.tar(another / "tree", another / "rootfs.tar")
            argv: list[str | Path] = ["buildah", "build", "--isolation", "chroot", "--quiet"]
            Programs().capture([*argv, "--tag", self.name, another])
            return described

    with odd_root.in_buildah(another) as name:
        packed = pack(Rebuilt(name, Programs()), f"buildah://{name}", tmp_path / "a.sqsh")
        listed = Programs().capture(["buildah", "containers", "--format", "{{.ImageName}}"])
        assert name not in listed
    assert Programs().capture(["unsquashfs", "-cat", packed.path, "etc/another"]) == "another"
    environment = Programs().capture(["unsquashfs", "-cat", packed.path, "etc/environment"])
    assert "WHO=another" in environment


def test_a_buildah_image_that_goes_away_meanwhile(another: Path, tmp_path: Path) -> None:
    class Removed(source.Storage):
        def config(self) -> enroot.ImageConfig:
            described = super().config()
            Programs().capture(["buildah", "rmi", self.name])
            return described

    with (
        odd_root.in_buildah(another) as name,
        pytest.raises(WorkError, match=r"cannot be opened: .*image not known") as caught,
    ):
        pack(Removed(name, Programs()), f"buildah://{name}", tmp_path / "a.sqsh")
    assert "pack it again" in caught.value.fix
    assert not list(tmp_path.glob("a.sqsh*"))
