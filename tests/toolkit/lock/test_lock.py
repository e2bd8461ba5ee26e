"""Locks: hashes for every package, changes noticed, nothing invented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sqshforge import lock, project, recipe
from sqshforge.cli import main
from sqshforge.errors import RequestError
from sqshforge.lock import Lock
from sqshforge.lock.model import LockedApt
from sqshforge.project import Project
from tests.support import checkouts
from tests.support.command_line import sqshforge


def copied(root: Path, folder: Path) -> Path:
    """Make a separate recipes folder, including the lock."""
    (folder / "locks").mkdir(parents=True)
    for name in ("cpu-mamba.yaml", "locks/cpu-mamba.lock"):
        (folder / name).write_bytes((root / "recipes" / name).read_bytes())
    return folder


def test_every_package_of_the_lock_has_hashes(root: Path) -> None:
    for name in recipe.targets(root / "recipes"):
        locked = lock.load(recipe.find(name, root / "recipes"), root / "recipes")
        assert locked.python.packages
        for package in locked.python.packages:
            assert package.hashes
            assert all(one.startswith("sha256:") and len(one) == 71 for one in package.hashes)


def test_torch_is_the_cpu_build_and_brings_no_cuda_package(root: Path) -> None:
    locked = lock.load(recipe.find("cpu-mamba", root / "recipes"), root / "recipes")
    versions = {package.name: package.version for package in locked.python.packages}
    assert versions["torch"].endswith("+cpu")
    assert not [name for name in versions if name.startswith(("nvidia", "cuda", "triton"))]


def test_every_platform_has_a_lock_of_its_own(root: Path) -> None:
    """The versions are those of the first one, unless the recipe pins others there."""
    recipes, found = root / "recipes", {}
    for name in recipe.targets(recipes):
        for platform in recipe.platforms_of(name, recipes):
            what = recipe.find(name, recipes, platform=platform)
            python = lock.load(what, recipes).python
            assert python.platform == f"{what.platform.machine}-manylinux_2_28"
            found[what.name] = {one.name: one.version for one in python.packages}
    arm, x86 = found["cpu-mamba.arm64"], found["cpu-mamba"]
    assert {name for name in x86 if arm[name] != x86[name]} == {"torch"}
    assert not [name for name in arm if name.startswith(("nvidia", "cuda", "triton"))]
    assert found["cuda13-mamba.arm64"] == found["cuda13-mamba"]
    assert sorted(found) == sorted(path.stem for path in (recipes / "locks").glob("*.lock"))


def test_the_locked_base_without_a_digest_is_said_to_be_unlocked(root: Path) -> None:
    locked = lock.load(recipe.find("cpu-mamba", root / "recipes"), root / "recipes")
    assert (locked.base.digest is None) == any("base image" in one for one in locked.unlocked)


def test_a_recipe_with_other_pins_makes_the_lock_out_of_date(root: Path, tmp_path: Path) -> None:
    recipes = copied(root, tmp_path)
    path = recipes / "cpu-mamba.yaml"
    path.write_text(path.read_text().replace("numpy==2.3.4", "numpy==2.3.5"))
    with pytest.raises(RequestError, match="out of date") as caught:
        lock.load(recipe.load(path), recipes)
    assert caught.value.fix == "sqshforge lock cpu-mamba"


def test_what_is_no_pin_does_not_touch_the_lock(root: Path, tmp_path: Path) -> None:
    recipes = copied(root, tmp_path)
    path = recipes / "cpu-mamba.yaml"
    path.write_text(path.read_text().replace("disk_gb: 5.0", "disk_gb: 9.5"))
    assert lock.load(recipe.load(path), recipes).target == "cpu-mamba"


@pytest.mark.parametrize("text", ["", "{", '{"target": "cpu-mamba"}', "\x00"])
def test_a_broken_lock_is_one_clear_error(root: Path, tmp_path: Path, text: str) -> None:
    recipes = copied(root, tmp_path)
    (recipes / "locks" / "cpu-mamba.lock").write_text(text)
    with pytest.raises(RequestError, match="cannot be read") as caught:
        lock.load(recipe.load(recipes / "cpu-mamba.yaml"), recipes)
    assert "cpu-mamba.lock" in caught.value.where


def test_a_missing_lock_names_the_command_that_makes_it(root: Path, tmp_path: Path) -> None:
    recipes = copied(root, tmp_path)
    (recipes / "locks" / "cpu-mamba.lock").unlink()
    with pytest.raises(RequestError, match="no lock") as caught:
        lock.load(recipe.load(recipes / "cpu-mamba.yaml"), recipes)
    assert caught.value.fix == "sqshforge lock cpu-mamba"


def test_requirements_are_what_pip_reads(root: Path) -> None:
    locked = lock.load(recipe.find("cpu-mamba", root / "recipes"), root / "recipes")
    assert lock.parse_compiled(lock.requirements(locked.python.packages)) == locked.python.packages


@pytest.mark.processes
def test_the_command_tells_drift(root: Path) -> None:
    path = root / "recipes" / "locks" / "cpu-mamba.lock"
    before = path.read_text()
    done = sqshforge("lock", "no-such", "--check")
    assert done.code == 2
    assert "unknown target 'no-such'" in done.err
    assert path.read_text() == before
    assert json.loads(before)["target"] == "cpu-mamba"


def test_a_lock_that_cannot_be_read_is_not_taken_for_none(tmp_path: Path) -> None:
    """As after a merge with conflicts: every version in it would be resolved anew."""
    assert lock.earlier("app", tmp_path) is None
    path = lock.path_of("app", tmp_path)
    path.parent.mkdir()
    path.write_text("<<<<<<< HEAD\n")
    with pytest.raises(RequestError, match="the lock cannot be read") as caught:
        lock.earlier("app", tmp_path)
    assert caught.value.where == str(path)
    assert caught.value.fix == "restore it, as by git; or remove it, then sqshforge lock app"


def test_versions_of_debian_packages_are_no_change(root: Path) -> None:
    locked = lock.read("cpu-mamba", root / "recipes")
    assert locked.apt is not None
    assert lock.changes(locked, locked.model_copy(update={"apt": None})) == []


@pytest.mark.processes
def test_a_lock_that_notes_other_debian_versions_is_said_to_be_written(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noting(version: str) -> Lock:
        noted = LockedApt(suite="bookworm", packages=(("libzstd1", version),))
        return lock.read("cpu-mamba", root / "recipes").model_copy(update={"apt": noted})

    def run(*words: str) -> str:
        asked = ["lock", "cpu-mamba", "--platform", "linux/amd64", *words]
        done = CliRunner().invoke(main.cli, asked)
        assert done.exit_code == 0, done.output
        (line,) = (one for one in done.output.splitlines() if one.startswith(f"{path}: "))
        return line.removeprefix(f"{path}: ")

    checkout = checkouts.copy(tmp_path / "checkout")
    path = lock.path_of("cpu-mamba", checkout / "recipes")
    path.write_text(noting("1").text())
    monkeypatch.setattr(project, "find", lambda: Project(checkout))
    monkeypatch.setattr(lock, "resolve", lambda *_: noting("2"))
    assert run("--check") == "up to date"
    assert path.read_text() == noting("1").text()
    assert run() == "written: other versions of Debian packages, which are noted and not pinned"
    assert path.read_text() == noting("2").text()
    path.chmod(0o600)  # a new file would be everybody's to read
    assert run() == "up to date"
    assert path.stat().st_mode & 0o777 == 0o600
