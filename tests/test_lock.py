"""Locks: hashes for every package, drift noticed, nothing invented."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from sqshforge import lock, machine, recipe
from sqshforge.errors import RequestError, WorkError
from sqshforge.mirrors import Mirrors
from sqshforge.programs import Programs, Result
from sqshforge.progress import Reporter
from sqshforge.project import Project
from tests.commands import sqshforge


def copied(root: Path, folder: Path) -> Path:
    """A recipes folder of its own, with its lock."""
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


def test_the_locked_base_without_a_digest_is_said_to_be_unlocked(root: Path) -> None:
    locked = lock.load(recipe.find("cpu-mamba", root / "recipes"), root / "recipes")
    assert (locked.base.digest is None) == any("base image" in one for one in locked.unlocked)


def test_a_recipe_with_other_pins_makes_the_lock_out_of_date(root: Path, tmp_path: Path) -> None:
    recipes = copied(root, tmp_path)
    path = recipes / "cpu-mamba.yaml"
    path.write_text(path.read_text().replace("numpy==2.3.4", "numpy==2.3.5"))
    with pytest.raises(RequestError, match="out of date") as caught:
        lock.load(recipe.load(path), recipes)
    assert caught.value.mend == "sqshforge lock cpu-mamba"


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
    assert caught.value.mend == "sqshforge lock cpu-mamba"


def test_requirements_are_what_pip_reads(root: Path) -> None:
    locked = lock.load(recipe.find("cpu-mamba", root / "recipes"), root / "recipes")
    assert lock.parse_compiled(lock.requirements(locked.python.packages)) == locked.python.packages


class Small(Programs):
    """The real programs, with the registry's answer given by the test."""

    def __init__(self, digest: str) -> None:
        self.digest = digest

    def which(self, program: str) -> Path | None:
        return Path("/usr/bin/skopeo") if program == "skopeo" else super().which(program)

    def attempt(
        self,
        argv: Sequence[str | Path],
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float | None = None,
    ) -> Result:
        if str(argv[0]) == "skopeo":
            return Result(tuple(map(str, argv)), 0, f"{self.digest}\n", "")
        return super().attempt(argv, stdin=stdin, env=env, cwd=cwd, timeout=timeout)


def asked(programs: Programs, folder: Path, mirrors: Mirrors | None = None) -> lock.Asked:
    """Whom a lock is resolved with: this machine as it is."""
    return lock.Asked(
        project=Project(folder),
        pip=machine.pip(programs),
        mirrors=mirrors or Mirrors(),
        programs=programs,
        reporter=Reporter(quiet=True),
    )


def one_package(root: Path, tmp_path: Path, requirement: str) -> recipe.Recipe:
    text = (root / "recipes" / "cpu-mamba.yaml").read_text()
    head, _, tail = text.partition("    - numpy")
    rest = tail.partition("\nenv:")[2]
    path = tmp_path / "cpu-mamba.yaml"
    path.write_text(f"{head}    - {requirement}\nenv:{rest}")
    return recipe.load(path)


def test_resolving_asks_the_real_index_and_the_registry(root: Path, tmp_path: Path) -> None:
    programs = Small("sha256:" + "a" * 64)
    what = one_package(root, tmp_path, "filelock==3.20.0")
    locked = lock.resolve(what, asked(programs, tmp_path))
    assert [package.name for package in locked.python.packages] == ["filelock"]
    assert locked.python.packages[0].hashes
    assert locked.python.installer.name == "pip"
    assert locked.base.digest == programs.digest
    assert locked.unlocked == ()


def test_a_version_that_is_not_there_is_a_clear_error(root: Path, tmp_path: Path) -> None:
    programs = Programs()
    what = one_package(root, tmp_path, "filelock==999.0.0")
    with pytest.raises(WorkError, match=r"filelock==999\.0\.0") as caught:
        lock.resolve(what, asked(programs, tmp_path))
    assert "python.packages" in caught.value.where


def test_the_command_tells_drift(root: Path) -> None:
    path = root / "recipes" / "locks" / "cpu-mamba.lock"
    before = path.read_text()
    done = sqshforge("lock", "no-such", "--check")
    assert done.code == 2
    assert "unknown target 'no-such'" in done.err
    assert path.read_text() == before
    assert json.loads(before)["target"] == "cpu-mamba"
