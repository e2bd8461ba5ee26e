"""The rehearsal of Triton's stage with docker, and from a bundle without a network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sqshforge.engine import Engine
from tests.support.engines import docker_host_fixture as docker_host_fixture
from tests.support.engines import engine_fixture as engine_fixture
from tests.support.engines import storage_fixture as storage_fixture
from tests.support.web_servers import Web
from tests.toolkit.build.test_bundle import sqshforge
from tests.toolkit.build.test_triton_source import TARGET, rehearse
from tests.toolkit.build.test_triton_source import checkout as checkout
from tests.toolkit.build.test_triton_source import web as web

pytestmark = pytest.mark.processes


@pytest.mark.root
@pytest.mark.parametrize("engine", ["docker"], indirect=True)
def test_all_is_where_the_build_looks_for_it_and_nothing_answers_it(
    engine: Engine, checkout: Path, web: Web, tmp_path: Path
) -> None:
    rehearse(engine, checkout, web, tmp_path)


def test_a_bundle_has_it_all_and_builds_without_a_network(
    storage: None, checkout: Path, web: Web
) -> None:
    done = sqshforge(checkout, "vendor", TARGET, "--engine", "buildah")
    assert done.code == 0, done.err
    held = checkout / "build" / "vendor" / TARGET
    names = {path.name for path in (held / "archives").iterdir()}
    assert names == {"llvm.tar.gz", "cuobjdump.tar.xz", "nvdisasm.tar.xz", "ptxas.tar.xz"}
    stems = {re.sub(r"-[0-9a-f]{40}\.tar$", "", one.name) for one in (held / "sources").iterdir()}
    assert stems == {"googletest", "triton"}
    web.stop()
    done = sqshforge(checkout, "build", TARGET, "--engine", "buildah", OFFLINE="1")
    assert done.code == 0, done.err
