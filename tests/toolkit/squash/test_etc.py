"""Whatever an image has as /etc, all ways to pack it put enroot's files in the same place."""

from __future__ import annotations

from pathlib import Path

import pytest

from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.image import address as source
from sqshforge.squash import pack
from tests.support import archives, odd_root
from tests.support.engines import CLIENT
from tests.support.engines import docker_fixture as docker_fixture
from tests.support.engines import docker_host_fixture as docker_host_fixture

pytestmark = pytest.mark.processes

# Docker puts files into the /etc of every container, and a folder in its place where it is one of
# these: its export does not show the image as it is.
LOST = {"a relative link", "an absolute link", "a link to a link", "a link through a link"}


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
    exported = tree(
        source.Dockerd(identity, Programs(), way=source.ReadMode.EXPORTED), tmp_path / "exported"
    )
    if name in LOST:
        assert {f"etc/{Path(file).name}" for file in odd_root.FILES} <= set(exported)
    else:
        assert exported == archived
