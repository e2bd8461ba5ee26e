"""Triton from source: a rehearsal of its stage, with small files in the place of the real ones.

The fragment, the lock, the downloads and the engines are real; Triton, LLVM, NVIDIA's programs and
googletest are made up. Their setup.py and CMakeLists.txt look for each other where the real ones
do, and try to get something from the network.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from sqshforge import lock, recipe
from sqshforge.engine import Engine
from sqshforge.errors import MissingError
from sqshforge.host.files import sha256
from sqshforge.lock.model import LockedArchive, LockedSource
from tests.support import checkouts
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
SETUP = """import os, pathlib, subprocess, sys, urllib.request

def refused(*argv):
    assert subprocess.run(argv, capture_output=True).returncode != 0, argv

for program in ("ptxas", "cuobjdump", "nvdisasm"):
    said = subprocess.check_output([f"triton/third_party/cuda/bin/{program}", "--version"])
    assert said == b"V12.3.52\\n", said
llvm, pybind11 = (pathlib.Path(os.environ[f"{one}_SYSPATH"]) for one in ("LLVM", "PYBIND11"))
assert (llvm / "include/llvm/Config.h").is_file()
assert (llvm / "lib/cmake/mlir/MLIRConfig.cmake").is_file()
assert (pybind11 / "include/pybind11/pybind11.h").is_file()
assert os.environ["HOME"] == "/build/home" and int(os.environ["MAX_JOBS"]) > 0

for address in ("WEB/by-urllib", "https://127.0.0.1/by-urllib"):
    assert urllib.request.getproxies()[address.split(":")[0]] == "http://127.0.0.1:9"
    assert not urllib.request.proxy_bypass("127.0.0.1")
try:
    urllib.request.urlopen("WEB/by-urllib")
except OSError:
    pass
else:
    sys.exit("urllib reaches the network")
refused("curl", "--fail", "WEB/by-curl")
refused("git", "ls-remote", "WEB/by-git")
refused("git", "-c", "protocol.allow=always", "ls-remote", "WEB/by-git")

work = pathlib.Path("build/cmake")
work.mkdir(parents=True, exist_ok=True)
assert b"cmake version" in subprocess.check_output(["cmake", "--version"])
subprocess.check_call(
    ["cmake", os.path.abspath(".."), "-G", "Unix Makefiles", "-DCMAKE_MAKE_PROGRAM=/bin/true"],
    cwd=work,
)
subprocess.check_call(["cmake", "--build", ".", "-j1"], cwd=work)
assert (work / "googletest.txt").read_text() == "/tmp/googletest"
assert sys.argv[1:3] == ["bdist_wheel", "--dist-dir"]
pathlib.Path(sys.argv[3], "triton-2.2.0-py3-none-any.whl").write_text("a wheel")
"""
CMAKE = """cmake_minimum_required(VERSION 3.18)
project(triton NONE)
include(FetchContent)
set(GOOGLETEST_DIR "" CACHE STRING "a folder with googletest")
if(GOOGLETEST_DIR)
  set(FETCHCONTENT_SOURCE_DIR_GOOGLETEST ${GOOGLETEST_DIR} CACHE STRING "")
endif()
FetchContent_Declare(googletest GIT_REPOSITORY WEB/by-cmake.git GIT_TAG release)
FetchContent_MakeAvailable(googletest)
file(WRITE ${CMAKE_BINARY_DIR}/googletest.txt ${googletest_SOURCE_DIR})
"""
PROGRAM = "#!/bin/sh\necho V12.3.52\n"


def packed(path: Path, files: Mapping[str, str]) -> str:
    """A tar with these files, all to be run, and its address."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = "xz" if path.suffix == ".xz" else "gz"
    with tarfile.open(path, f"w:{kind}") as archive:  # type: ignore[call-overload]
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text.encode()), 0o755
            archive.addfile(member, io.BytesIO(text.encode()))
    return path.as_uri()


def repository(place: Path, files: Mapping[str, str]) -> str:
    """A git repository with one commit of these files, on a branch, and that commit."""
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    git = ["git", "-C", str(place), *who]
    for words in (
        ["init", "--quiet", "-b", "main"],
        ["add", "."],
        ["commit", "--quiet", "-m", "x"],
    ):
        subprocess.run([*git, *words], check=True)
    argv = [*git, "rev-parse", "HEAD"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def rehearsal(root: Path, upstream: Path, web: Web) -> Path:
    """A checkout whose target compiles the made-up Triton; its lock knows every sum."""
    files = {name: text.replace("WEB", web.url) for name, text in (("S", SETUP), ("C", CMAKE))}
    commits = {
        "triton": repository(
            upstream / "triton", {"python/setup.py": files["S"], "CMakeLists.txt": files["C"]}
        ),
        "googletest": repository(
            upstream / "googletest", {"CMakeLists.txt": "project(googletest NONE)\n"}
        ),
    }
    tars = {one: f"{one}.tar.xz" for one in ("cuobjdump", "nvdisasm", "ptxas")}
    addresses = {
        one: packed(upstream / file, {f"cuda-1/bin/{one}": PROGRAM, "cuda-1/LICENSE": ""})
        for one, file in tars.items()
    }
    inside = {"include/llvm/Config.h": "", "lib/cmake/mlir/MLIRConfig.cmake": ""}
    tars["llvm"] = "llvm.tar.gz"
    addresses["llvm"] = packed(
        upstream / tars["llvm"], {f"llvm-1/{k}": v for k, v in inside.items()}
    )
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
    """A checkout, whose build passes on a proxy that is none, and whom not to ask it for."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, ",".join(filter(None, (os.environ.get(name), "127.0.0.1"))))
    return rehearsal(tmp_path / "checkout", tmp_path / "upstream", web)


@pytest.mark.parametrize("engine", ["buildah"], indirect=True)
def test_all_is_where_the_build_looks_for_it_and_nothing_answers_it(
    engine: Engine, checkout: Path, web: Web, tmp_path: Path
) -> None:
    """With docker, and from a bundle: tests/images/test_triton_stage.py."""
    rehearse(engine, checkout, web, tmp_path)


def rehearse(engine: Engine, checkout: Path, web: Web, tmp_path: Path) -> None:
    built = checkouts.build(engine, checkout)
    made = tmp_path / "made"
    made.mkdir()
    engine.copy_out(built.name, "/wheels", made)
    assert [path.name for path in made.iterdir()] == ["triton-2.2.0-py3-none-any.whl"]
    asked = [path for path, _ in web.asked]
    assert "/before-the-stage" in asked  # without what the stage does, the network is there
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
