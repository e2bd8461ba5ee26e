"""Virtual environments of a checkout: made by uv from the indexes that pip uses, else by pip."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sqshforge import lock
from sqshforge.host.programs import Programs, Result
from sqshforge.venv import GOALS, OF_IMAGES
from tests.support.web_servers import Index, wheel
from tests.support.web_servers import direct_fixture as direct_fixture
from tests.support.web_servers import new_index_fixture as new_index_fixture

NewIndex = Callable[..., Index]
OF_TORCH = ("torch", "triton")  # constraints/ leave these to the index that has torch's builds
PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "small"
version = "1.0"
optional-dependencies = {torch22 = ["made-up-tool"], lost = ["made-up-lost"], test = []}

[tool.setuptools]
py-modules = ["small"]
"""


@pytest.fixture(name="checkout")
def checkout_fixture(
    new_index: NewIndex, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A small project with our setup.sh, and pip configured with an index of its dependencies."""
    index = new_index(wheel("made-up-tool", says="here"))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", index.url)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "small.py").write_text("import made_up_tool\n\nprint(made_up_tool.SAYS)\n")
    (tmp_path / "setup.sh").write_bytes((root / "setup.sh").read_bytes())
    (tmp_path / "setup.sh").chmod(0o755)
    return tmp_path


def filled(checkout: Path, requirement: str) -> Result:
    """Make an environment and fill it, through the command line."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", checkout / "env"], check=True)
    argv = [sys.executable, "-m", "sqshforge.venv", "install", "env", requirement]
    return Programs().attempt(argv, cwd=checkout)


def said(checkout: Path, venv: str) -> str:
    return (
        Programs().capture([checkout / venv / "bin/python", "-m", "small"], cwd=Path("/")).strip()
    )


@pytest.mark.processes
def test_what_pip_is_configured_with_is_installed_by_uv(checkout: Path) -> None:
    done = filled(checkout, ".[torch22]")
    assert done.code == 0, done.err
    assert said(checkout, "env") == "here"
    (checkout / "small.py").write_text("print('edited')\n")
    assert said(checkout, "env") == "edited"


@pytest.mark.processes
def test_what_no_index_has_is_named(checkout: Path) -> None:
    done = filled(checkout, ".[lost]")
    assert done.code != 0
    assert "made-up-lost" in done.err


@pytest.mark.processes
def test_a_configuration_that_pip_cannot_read_is_reported(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "pip.conf").write_text("no section\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(checkout / "pip.conf"))
    done = filled(checkout, ".[torch22]")
    assert done.code == 1 and done.err.startswith("error: "), done.err
    assert "File contains no section headers" in done.err and "Traceback" not in done.err


@pytest.mark.processes
def test_what_uv_cannot_install_pip_does(checkout: Path) -> None:
    """The small project does not bring sqshforge, and thus no uv."""
    done = Programs().attempt([checkout / "setup.sh", "torch22"], cwd=checkout)
    assert done.code == 0, done.err
    assert said(checkout, ".venv22") == "here"
    again = Programs().attempt([checkout / "setup.sh", "torch22"], cwd=checkout)
    assert (again.code, again.out) == (0, "")


@pytest.mark.processes
def test_what_the_tests_take_is_added_to_what_is_there(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a fresh clone, too: the .venv that is made first contains uv."""
    text = PROJECT.replace("[tool.", 'dependencies = ["made-up-tool"]\n\n[tool.')
    (checkout / "pyproject.toml").write_text(text)
    monkeypatch.setenv("PIP_LOG", str(checkout / "log"))
    done = Programs().attempt([checkout / "setup.sh", "dev"], cwd=checkout)
    assert (done.code, done.out) == (0, "making .venv\nmaking .venv for test\n"), done.err
    assert said(checkout, ".venv") == "here"
    installed = re.findall("Successfully installed .*", (checkout / "log").read_text())
    assert sum("made-up-tool" in one for one in installed) == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("locked", "installed"), [("1.0", "older"), ("3.0", "newer")], ids=["there", "not in the index"]
)
def test_the_version_that_was_tested_is_installed_where_the_index_has_it(
    locked: str,
    installed: str,
    checkout: Path,
    new_index: NewIndex,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = new_index(
        wheel("made-up-tool", "1.0", says="older"), wheel("made-up-tool", "2.0", says="newer")
    )
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", index.url)
    (checkout / "constraints").mkdir()
    (checkout / "constraints/torch22.txt").write_text(f"made-up-tool=={locked}\n")
    done = Programs().attempt([checkout / "setup.sh", "torch22"], cwd=checkout)
    assert done.code == 0, done.err
    assert said(checkout, ".venv22") == installed
    assert ("note: the package index lacks" in done.err) == (installed == "newer")


@pytest.mark.processes
def test_locking_without_an_index_is_reported(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make constraints` runs it this way."""
    (checkout / "pyproject.toml").write_text(
        PROJECT.replace("[tool.", 'dependencies = ["made-up-tool"]\n\n[tool.')
    )
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:1/simple")
    done = Programs().attempt([sys.executable, "-m", "sqshforge.venv", "lock"], cwd=checkout)
    assert done.code == 1 and done.err.startswith("error: "), done.err
    assert "127.0.0.1:1" in done.err and "Traceback" not in done.err
    assert not (checkout / "constraints").exists()


def test_the_locked_versions_are_those_of_every_python_and_name_no_index(root: Path) -> None:
    """What `python -m sqshforge.venv lock` has written, for all declared dependencies."""
    declared = [Requirement(one) for one in requires("sqshforge") or ()]
    for goal, extra in GOALS.items():
        lines = (root / "constraints" / f"{goal}.txt").read_text().splitlines()
        locked = [Requirement(one) for one in lines]
        assert all(re.fullmatch(r"==[^*,]+", str(one.specifier)) for one in locked)
        assert "://" not in "".join(lines)
        for python in ("3.10", "3.11", "3.12", "3.13"):
            where = {"python_version": python, "python_full_version": f"{python}.1", "extra": extra}
            here = {
                canonicalize_name(one.name): str(one.specifier).removeprefix("==")
                for one in locked
                if one.marker is None or one.marker.evaluate(where)
            }
            for one in declared:
                if one.name not in OF_TORCH and (one.marker is None or one.marker.evaluate(where)):
                    assert one.specifier.contains(here[canonicalize_name(one.name)]), (goal, one)


def test_an_environment_of_an_image_s_versions_has_those_of_its_lock(root: Path) -> None:
    """Packages in both have the image's version; torch's is the extra's, its build the index's."""
    declared = [Requirement(one) for one in requires("sqshforge") or ()]
    for goal, target in OF_IMAGES.items():
        python = lock.read(target, root / "recipes").python
        image = {one.name: one.version for one in (*python.packages, *python.built)}
        lines = (root / "constraints" / f"{goal}.txt").read_text().splitlines()
        pins = [Requirement(one) for one in lines]
        pins += [one for one in declared if one.marker and one.marker.evaluate({"extra": goal})]
        shared = [one for one in pins if canonicalize_name(one.name) in image]
        assert {"torch", "mosaicml", "torchvision", "numpy"} <= {one.name for one in shared}
        for one in shared:
            assert one.specifier.contains(image[canonicalize_name(one.name)]), (goal, one)
