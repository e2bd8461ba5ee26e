"""A wheel of this checkout, in a clean virtual environment: what needs no checkout works there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools leaves its own files beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("sqshforge", "training"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    python("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(folder))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new virtual environment with the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    python("-m", "venv", str(folder))
    python("-m", "pip", "install", "--quiet", str(wheel), program=folder / "bin" / "python")
    return folder / "bin"


def python(*words: str, program: str | Path = sys.executable) -> str:
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    ours = {
        str(path.relative_to(ROOT))
        for name in ("sqshforge", "training")
        for pattern in ("*.py", "*.conf", "*.json")
        for path in (ROOT / name).rglob(pattern)
    }
    assert held == ours


def test_an_image_is_packed_and_looked_at(programs: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "hello").write_text("hi\n")
    file = tmp_path / "a.sqsh"
    said = run(programs, tmp_path, "pack", f"rootfs:{root}", "-o", str(file))
    assert said.returncode == 0 and file.exists(), said.stderr
    assert run(programs, tmp_path, "verify", str(file)).returncode == 0
    shown = run(programs, tmp_path, "inspect", str(file))
    assert shown.returncode == 0 and "a.sqsh" in shown.stdout


def test_what_takes_a_checkout_says_so(programs: Path, tmp_path: Path) -> None:
    said = run(programs, tmp_path, "targets")
    assert said.returncode == 3
    assert "recipes/ and images/ are not beside the sqshforge package" in said.stderr


def run(programs: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the installed program, which finds nothing of this checkout."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    argv = [str(programs / "sqshforge"), *words]
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
