"""Images for another machine, built by both engines: their content says which one they are for."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from sqshforge import platforms
from sqshforge.engine import Build, Engine
from tests.support.engines import docker_fixture as docker_fixture
from tests.support.engines import docker_host_fixture as docker_host_fixture
from tests.support.engines import engine_fixture as engine_fixture
from tests.support.engines import storage_fixture as storage_fixture

pytestmark = pytest.mark.processes

BASE, MADE = "localhost/sqshforge-test-other-base:1", "localhost/sqshforge-test-other:1"
DOCKERFILE = "ARG BASE\nFROM ${BASE}\nLABEL io.sqshforge.target=none\nCOPY payload /payload\n"


def architecture(engine: Engine, name: str, folder: Path) -> str:
    """Return the architecture in an image's config."""
    place = folder / "saved.tar"
    engine.save(name, place)
    with tarfile.open(place) as saved:

        def read(member: str) -> str:
            file = saved.extractfile(member)
            assert file is not None
            return file.read().decode()

        (image,) = json.loads(read("manifest.json"))
        found = str(json.loads(read(image["Config"]))["architecture"])
    place.unlink()
    return found


def test_a_base_and_what_is_built_on_it_are_for_the_other_machine(
    engine: Engine, tmp_path: Path
) -> None:
    """Nothing runs in it, because that would need an emulator."""
    other = next(one for one in platforms.ALL.values() if not one.is_own)
    (tmp_path / "program").write_bytes(other.smallest_program())
    with tarfile.open(tmp_path / "root.tar", "w") as root:
        root.add(tmp_path / "program", "bin/program")
    engine.load(tmp_path / "root.tar", BASE, other)
    assert architecture(engine, BASE, tmp_path) == other.architecture
    context = tmp_path / "context"
    (context / "payload").mkdir(parents=True)
    (context / "payload" / "file").write_text("x")
    (context / "Dockerfile").write_text(DOCKERFILE)
    build = Build(context=context, name=MADE, args={"BASE": BASE}, platform=other)
    engine.build(build, lambda line: None)
    assert architecture(engine, MADE, tmp_path) == other.architecture
    own = platforms.ALL[platforms.own()]
    engine.load(tmp_path / "root.tar", BASE, own)
    assert architecture(engine, BASE, tmp_path) == own.architecture
