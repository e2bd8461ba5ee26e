"""Our patches of source distributions, tried on the real ones with stand-ins for torch and nvcc."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs, Result
from tests.conftest import ROOT

pytestmark = pytest.mark.processes

PATCHES = ROOT / "patches"
WHEELS = {"triton-2.2.0"}  # it has no source distribution: test_triton_cache.py tries its patches
FOLDERS = sorted(folder.name for folder in PATCHES.iterdir() if folder.name not in WHEELS)
NEWEST = "13.0"  # of CUDA: with it, setup.py compiles for every architecture that it knows
# What setup.py needs of torch, and the compiler whose version it asks for.
STUB = {
    "torch/__init__.py": "from torch import version\n__version__ = '2.9.0'\n",
    "torch/version.py": f"cuda, hip = '{NEWEST}', None\n",
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": """
from pathlib import Path
BuildExtension = CppExtension = HIP_HOME = None
CUDAExtension = dict
CUDA_HOME = str(Path(__file__).parents[2])
""",
    "bin/nvcc": '#!/bin/sh\necho "Cuda compilation tools, release $RELEASE, V$RELEASE.1"\n',
}
# Prints the arguments that setup.py would pass to nvcc, as the last line.
RECORD = """
import json, runpy, setuptools
def setup(ext_modules, **others):
    print(json.dumps([module["extra_compile_args"]["nvcc"] for module in ext_modules]))
setuptools.setup = setup
runpy.run_path("setup.py")
"""


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for PYTHONPATH: our build machines have no CUDA, and setup.py needs no more."""
    folder = tmp_path_factory.mktemp("stub")
    for name, text in STUB.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "bin/nvcc").chmod(0o755)
    return folder


@pytest.fixture(scope="session", params=FOLDERS)
def name(request: pytest.FixtureRequest) -> str:
    """Each folder of patches in turn: NAME-VERSION."""
    return str(request.param)


@pytest.fixture(scope="session")
def source(name: str, stub: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution, unchanged."""
    folder = tmp_path_factory.mktemp(name)
    argv: list[str | Path] = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    argv += ["--no-binary=:all:", "--no-build-isolation", "--dest", folder]
    # pip asks setup.py for metadata, which must not make it look for prebuilt wheels or compilers.
    skip = {"CAUSAL_CONV1D_SKIP_CUDA_BUILD": "TRUE", "MAMBA_SKIP_CUDA_BUILD": "TRUE"}
    env = {**skip, "PYTHONPATH": str(stub)}
    Programs().capture([*argv, "==".join(name.rsplit("-", 1))], env=env)
    (file,) = folder.glob("*.tar.gz")
    Programs().capture(["tar", "-x", "-f", file, "-C", folder])
    file.unlink()
    (unpacked,) = folder.iterdir()
    return unpacked


def patched(source: Path, patch: Path, place: Path) -> tuple[Path, str]:
    """Copy the source and apply the patch; returns the copy and patch's output."""
    shutil.copytree(source, place, copy_function=os.link)
    argv: list[str | Path] = ["patch", "--fuzz=0", "--strip=1", "--directory", place]
    return place, Programs().capture([*argv, "--input", patch])


@pytest.fixture(scope="session")
def ours(name: str, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution with the patch for its architectures."""
    place = tmp_path_factory.mktemp(name) / "patched"
    return patched(source, PATCHES / name / "architectures.patch", place)[0]


def test_a_patch_says_what_it_makes_of_what(name: str, source: Path, tmp_path: Path) -> None:
    for patch in sorted((PATCHES / name).glob("*.patch")):
        header, _, change = patch.read_text().partition("\n--- a/")
        file = change.splitlines()[0]
        place, said = patched(source, patch, tmp_path / patch.stem)
        assert said == f"patching file {file}\n"  # the patch fits without fuzz or offset
        shown = re.findall(r"^(?:Before|After): ([0-9a-f]{64})$", header, re.MULTILINE)
        made = [(tree / file).read_bytes() for tree in (source, place)]
        assert shown == [hashlib.sha256(content).hexdigest() for content in made]


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_ARCHITECTURES", raising=False)


def run(tree: Path, stub: Path, asked: str | None, release: str = NEWEST) -> Result:
    env = {"PYTHONPATH": str(stub), "RELEASE": release}
    if asked is not None:
        env["CUDA_ARCHITECTURES"] = asked
    return Programs().attempt([sys.executable, "-c", RECORD], cwd=tree, env=env)


def flags(tree: Path, stub: Path, asked: str | None = None, release: str = NEWEST) -> list[str]:
    """Return the arguments that nvcc would be called with."""
    result = run(tree, stub, asked, release)
    assert result.code == 0, result.err
    (words,) = json.loads(result.out.splitlines()[-1])
    return [str(word) for word in words]


@pytest.mark.parametrize(
    ("asked", "codes"),
    [
        ("90", ["90,code=sm_90"]),
        ("80;90", ["80,code=sm_80", "90,code=sm_90"]),
        ("100a 120;", ["100a,code=sm_100a", "120,code=sm_120"]),
        ("90 120+PTX", ["90,code=sm_90", "120,code=sm_120", "120,code=compute_120"]),
    ],
)
def test_what_is_asked_for_is_compiled_for_and_nothing_else(
    asked: str, codes: list[str], source: Path, ours: Path, stub: Path
) -> None:
    stock = flags(source, stub)
    first, many = stock.index("-gencode"), stock.count("-gencode")
    named = [word for code in codes for word in ("-gencode", f"arch=compute_{code}")]
    assert flags(ours, stub, asked) == stock[:first] + named + stock[first + 2 * many :]


@pytest.mark.parametrize(("asked", "release"), [(None, NEWEST), (None, "11.7"), ("", NEWEST)])
def test_where_nothing_is_asked_for_it_is_as_before(
    asked: str | None, release: str, source: Path, ours: Path, stub: Path
) -> None:
    stock = flags(source, stub, release=release)
    assert stock.count("-gencode") > 1
    assert flags(ours, stub, asked, release) == stock


@pytest.mark.parametrize(
    ("asked", "entry"), [("80 9.0", "9.0"), ("sm_90;80", "sm_90"), ("120+PTX+PTX", "120+PTX+PTX")]
)
def test_what_is_no_architecture_is_said(asked: str, entry: str, ours: Path, stub: Path) -> None:
    result = run(ours, stub, asked)
    assert result.code == 1
    assert "Traceback" not in result.err
    assert result.err.endswith(f"CUDA_ARCHITECTURES: {entry} is not like 90 or 100a\n")
