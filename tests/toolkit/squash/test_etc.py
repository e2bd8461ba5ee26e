"""Whatever an image has as /etc, every way to pack it puts enroot's files in the same place."""

from __future__ import annotations

from pathlib import Path

import pytest

from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.image import address as source
from sqshforge.squash import pack
from tests.support import archives, odd_root
from tests.support.engines import CLIENT, Unmounted
from tests.support.engines import docker_fixture as docker_fixture
from tests.support.engines import docker_host_fixture as docker_host_fixture

pytestmark = pytest.mark.processes


def tree(image: source.Source, place: Path) -> dict[str, odd_root.Entry]:
    options = pack.Options.of("fast")
    output = place.with_suffix(".sqsh")
    pack.pack(image, output, options, Programs(), Reporter(quiet=True))
    return odd_root.unpacked(output, place)


@pytest.mark.parametrize("name", archives.HOMES)
def test_every_way_gives_the_same_tree(name: str, tmp_path: Path, docker: str) -> None:
    members, home = archives.HOMES[name]
    image = archives.Image([archives.layer(*members)])
    address = archives.write(image, "docker-archive", tmp_path / "image.tar")
    loaded = Programs().capture([CLIENT, "load", "--input", tmp_path / "image.tar"])
    identity = loaded.strip().rpartition(" ")[2]
    archived = tree(source.parse(address, Programs()), tmp_path / "archived")
    assert {f"{home}/{Path(file).name}" for file in odd_root.FILES} <= set(archived)
    assert tree(source.Dockerd(identity, Programs()), tmp_path / "mounted") == archived
    assert tree(Unmounted(identity, Programs()), tmp_path / "saved") == archived
