"""Triton from source: a rehearsal of its stage, with small files in place of the real ones.

The fragment, the lock, the downloads and the engines are real; Triton, LLVM, NVIDIA's programs and
googletest are made up. Their setup.py and CMakeLists.txt look for each other where the real ones
do, and try to download something.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from sqshforge import lock, recipe
from sqshforge.engine import Engine
from sqshforge.errors import MissingError
from sqshforge.host.files import sha256
from sqshforge.lock.model import LockedArchive, LockedSource
from tests.support import checkouts, vendor_parts
from tests.support.engines import docker_host_fixture as docker_host_fixture
from tests.support.engines import engine_fixture as engine_fixture
from tests.support.engines import storage_fixture as storage_fixture
from tests.support.web_servers import Web, serving
from tests.toolkit.build.test_bundle import sqshforge

pytestmark = pytest.mark.processes

TARGET = checkouts.TARGET
TEMPLATE = """{% import "fragments/apt.j2" as apt with context %}
{% import "fragments/python.j2" as python with context %}
{% import "fragments/triton.j2" as triton_wheel with context %}
ARG BASE={{ base }}
FROM ${BASE} AS compiler
LABEL io.sqshforge.target={{ recipe.target }}
ARG DEBIAN_FRONTEND=noninteractive
{{ apt.install(recipe.apt_build, "compiler") }}
{{ python.builders(recipe.python.version, installer, sums) }}
RUN curl --silent WEB/before-the-stage || true

{{ triton_wheel.build(triton) }}

FROM ${BASE} AS image
LABEL io.sqshforge.target={{ recipe.target }}
COPY --from=triton /wheels/ /wheels/
COPY meta/ /sqshforge/meta/
COPY payload/ /sqshforge/
"""


def rehearsal(root: Path, upstream: Path, web: Web) -> Path:
    """A checkout whose target compiles the made-up Triton; its lock has every checksum."""
    commits = {
        one: vendor_parts.repository(upstream / one, vendor_parts.part(one, web.url))
        for one in ("triton", "googletest")
    }
    tars = {one: f"{one}.tar.xz" for one in vendor_parts.CUDA_PROGRAMS}
    addresses = {one: vendor_parts.cuda_program(upstream / file, one) for one, file in tars.items()}
    tars["llvm"] = "llvm.tar.gz"
    addresses["llvm"] = vendor_parts.llvm(upstream / tars["llvm"])
    checkouts.copy(root)
    (root / "build" / "vendor").unlink()
    template = root / "images" / f"{TARGET}.Dockerfile.j2"
    template.write_text(TEMPLATE.replace("WEB", web.url))
    path = root / "recipes" / f"{TARGET}.yaml"
    data = yaml.safe_load(path.read_text())
    pip = lock.read("cuda-mamba", root / "recipes").python
    builders = tuple(one for one in pip.builders if one.name == "pybind11")
    data |= {
        "apt": [],
        "apt_build": ["ca-certificates", "cmake", "curl", "git", "patch", "python3", "xz-utils"],
        "triton": {"version": "2.2.0", "from": "source"},
        "sources": {
            one: {"git": (upstream / one).as_uri(), "ref": "main", "commit": commit}
            for one, commit in commits.items()
        },
        "archives": {  # the first address never answers
            one: {"url": f"{web.url}/gone/{tars[one]}", "mirrors": [address]}
            for one, address in addresses.items()
        },
    }
    before = lock.read(TARGET, root / "recipes")
    kept = tuple(one for one in before.python.packages if one.name == "filelock")
    data["python"] |= {
        "packages": [f"filelock=={kept[0].version}"],
        "builders": [f"pybind11=={builders[0].version}"],
    }
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    what = recipe.load(path)
    now = before.model_copy(
        update={
            "inputs": lock.inputs(what),
            "python": before.python.model_copy(update={"packages": kept, "builders": builders}),
            "sources": tuple(
                LockedSource(name=name, git=one.git, ref=one.ref, commit=one.commit)
                for name, one in sorted(what.sources.items())
            ),
            "archives": tuple(
                LockedArchive(name=name, url=one.url, sha256=sha256(upstream / tars[name]))
                for name, one in sorted(what.archives.items())
            ),
        }
    )
    lock.path_of(TARGET, root / "recipes").write_text(now.text())
    return root


@pytest.fixture
def web() -> Iterator[Web]:
    with serving() as found:
        yield found


@pytest.fixture
def checkout(tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose build passes on a broken proxy, and the hosts that do not need it."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, ",".join(filter(None, (os.environ.get(name), "127.0.0.1"))))
    return rehearsal(tmp_path / "checkout", tmp_path / "upstream", web)


@pytest.mark.parametrize("engine", ["buildah"], indirect=True)
def test_all_is_where_the_build_looks_for_it_and_nothing_answers_it(
    engine: Engine, checkout: Path, web: Web, tmp_path: Path
) -> None:
    """Docker, and a bundle, are tested in tests/stages/test_triton.py."""
    rehearse(engine, checkout, web, tmp_path)


def rehearse(engine: Engine, checkout: Path, web: Web, tmp_path: Path) -> None:
    built = checkouts.build(engine, checkout)
    made = tmp_path / "made"
    made.mkdir()
    engine.copy_out(built.name, "/wheels", made)
    assert [path.name for path in made.iterdir()] == ["triton-2.2.0-py3-none-any.whl"]
    asked = [path for path, _ in web.asked]
    assert "/before-the-stage" in asked  # outside the stage there is a network
    assert "/gone/llvm.tar.gz" in asked
    assert not [path for path in asked if path.startswith("/by-")]


def test_where_no_address_of_llvm_answers_the_wheel_is_offered(
    storage: None, checkout: Path, tmp_path: Path, web: Web
) -> None:
    (tmp_path / "upstream" / "llvm.tar.gz").unlink()
    done = sqshforge(checkout, "build", TARGET, "--engine", "buildah")
    assert done.code == MissingError.exit_code
    assert "llvm.tar.gz cannot be fetched from any of its 2 addresses" in done.err
    assert f"{web.url}/gone/llvm.tar.gz: the host answers 404" in done.err
    assert (tmp_path / "upstream" / "llvm.tar.gz").as_uri() in done.err
    assert "triton: {from: wheel}" in done.err
