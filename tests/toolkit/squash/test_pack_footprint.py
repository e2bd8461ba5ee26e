"""Packing takes little of the machine: at 50,000 entries under 1 GiB of memory, and no disk."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs
from tests.support import resource_usage
from tests.support.archives import Image, file, folder, layer, write

pytestmark = pytest.mark.processes

ENTRIES = 50_000
LARGE = 200 << 20  # bytes of one file that nothing makes smaller


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an image: its tree, and archives of it."""
    place = tmp_path_factory.mktemp("footprint")
    chance = random.Random(6)
    members = [folder("etc"), file("etc/hosts"), file("large", chance.randbytes(LARGE))]
    for number in range(ENTRIES // 50):
        members.append(folder(f"some/folder-{number:04d}"))
        members += [file(f"some/folder-{number:04d}/file-{n}", b"x" * n) for n in range(49)]
    tar = layer(*members)
    (place / "tree").mkdir()
    Programs().capture(["tar", "-x", "-C", place / "tree"], stdin=tar)
    for kind in ("oci", "oci-archive", "docker-archive"):
        write(Image([tar], packing="zstd"), kind, place / kind)
    return place


@pytest.mark.parametrize("kind", ["oci:oci", "oci-archive:oci-archive", "rootfs:tree"])
def test_memory_and_disk(image: Path, tmp_path: Path, kind: str) -> None:
    scheme, _, name = kind.partition(":")
    output, work, cache = tmp_path / "out", tmp_path / "work", tmp_path / "cache"
    output.mkdir()
    work.mkdir()
    argv = [sys.executable, "-m", "sqshforge", "pack", f"{scheme}:{image / name}"]
    env = {"TMPDIR": str(work), "SQSHFORGE_CACHE": str(cache)}
    with (
        Programs().start(
            [*argv, "-o", output / "out.sqsh"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
        ) as process,
        resource_usage.watched(
            process.pid, lambda: resource_usage.size(output) + resource_usage.size(work)
        ) as peak,
    ):
        assert process.wait() == 0
    assert (output / "out.sqsh").stat().st_size > LARGE
    assert 20 << 20 < peak.memory < 1 << 30
    assert peak.disk - resource_usage.size(output) < 64 << 20
