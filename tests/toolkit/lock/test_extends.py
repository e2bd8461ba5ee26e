"""The lock of a recipe that extends another: the parent's, plus what was asked for."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from sqshforge import lock, recipe
from sqshforge.host.programs import Programs, Result
from sqshforge.lock import Lock, LockedImage, bases
from tests.support import checkouts
from tests.support.web_servers import Index, asking, small_recipe, wheel
from tests.support.web_servers import direct_fixture as direct_fixture
from tests.support.web_servers import new_index_fixture as new_index_fixture
from tests.toolkit.lock.test_resolving import ARCHIVE, GIT, Small, repository

pytestmark = pytest.mark.processes

INSTALLER = wheel("pip", "25.3")


@pytest.fixture
def index(new_index: Callable[..., Index]) -> Index:
    return new_index(wheel("app", needs=["tool"]), wheel("tool"), wheel("more"), INSTALLER)


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """A checkout whose only targets are `small` and what a test adds to extend it."""
    place = checkouts.copy(tmp_path / "checkout")
    shutil.rmtree(place / "recipes")
    place.joinpath("recipes").mkdir()
    small_recipe(place / "recipes", ["app==1.0"])
    return place


def extend(checkout: Path, *packages: str, name: str = "child", parent: str = "small") -> None:
    facts: dict[str, object] = {"target": name, "extends": parent, "title": "a test"}
    if packages:
        facts["python"] = {"packages": list(packages)}
    (checkout / "recipes" / f"{name}.yaml").write_text(yaml.safe_dump(facts))


def run(checkout: Path, index: Index, *words: str) -> Result:
    """Run `sqshforge lock WORDS`, with one index, and with files in place of hosts."""
    settings = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": index.url}
    settings |= {"PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    hosts = ("https://git.example.test", "https://files.example.test")
    files = checkout.parent.as_uri()
    settings["SQSHFORGE_MIRRORS_SOURCES"] = " ".join(f"{host}={files}" for host in hosts)
    argv = [sys.executable, "-m", "sqshforge", "lock", *words]
    done = Programs().attempt(argv, cwd=checkout, env=settings)
    assert "Traceback" not in done.err
    return done


def locked(checkout: Path, index: Index, target: str) -> Lock:
    done = run(checkout, index, target)
    assert done.code == 0, done.err
    return lock.read(target, checkout / "recipes")


def versions(found: Lock) -> dict[str, str]:
    return {one.name: one.version for one in found.python.packages}


def test_only_what_is_asked_for_differs_from_the_parent(checkout: Path, index: Index) -> None:
    parent = locked(checkout, index, "small")
    index.add(wheel("tool", "1.1"))
    extend(checkout, "more==1.0")
    assert versions(locked(checkout, index, "child")) == {
        "app": "1.0",
        "more": "1.0",
        "tool": "1.0",
    }
    extend(checkout)
    changes = lock.changes(parent, locked(checkout, index, "child"))
    assert changes == ["target changed"]


def test_of_several_generations_the_nearest_lock_counts(checkout: Path, index: Index) -> None:
    locked(checkout, index, "small")
    index.add(wheel("tool", "1.1"))
    extend(checkout, name="child")
    extend(checkout, "more==1.0", name="grandchild", parent="child")
    assert versions(locked(checkout, index, "grandchild"))["tool"] == "1.0"
    extend(checkout, "tool==1.1", name="child")
    locked(checkout, index, "child")
    assert versions(locked(checkout, index, "grandchild"))["tool"] == "1.1"


def test_a_parent_s_new_pins_go_before_the_earlier_lock(checkout: Path, index: Index) -> None:
    index.add(wheel("tool", "1.1"))
    extend(checkout, "more==1.0")
    assert versions(locked(checkout, index, "child"))["tool"] == "1.1"
    index.has = [one for one in index.has if one.name != wheel("tool", "1.1").name]
    index.add(wheel("tool"))
    locked(checkout, index, "small")
    index.add(wheel("tool", "1.1"))
    drifted = run(checkout, index, "child", "--check")
    assert (drifted.code, "child: tool: 1.1 -> 1.0" in drifted.err) == (1, True)
    assert versions(locked(checkout, index, "child"))["tool"] == "1.0"


def test_where_the_parent_s_version_does_not_fit_the_earlier_one_stays(
    checkout: Path, index: Index
) -> None:
    locked(checkout, index, "small")
    index.add(wheel("new", needs=["tool>1.0"]), wheel("tool", "1.1"))
    extend(checkout, "new==1.0")
    first = locked(checkout, index, "child")
    assert versions(first)["tool"] == "1.1"
    index.add(wheel("tool", "1.2"))
    assert locked(checkout, index, "child") == first
    assert run(checkout, index, "child", "--check").code == 0


def test_all_targets_are_locked_with_the_parents_first(checkout: Path, index: Index) -> None:
    extend(checkout, "more==1.0", name="a-child")
    index.add(wheel("tool", "1.1"))
    done = run(checkout, index)
    assert done.code == 0, done.err
    written = [Path(line.partition(":")[0]).stem for line in done.out.splitlines()[:2]]
    assert written == ["small", "a-child"]
    assert run(checkout, index, "--check").code == 0


def test_a_tag_or_file_that_has_changed_since_is_the_parent_s(checkout: Path, index: Index) -> None:
    folder = checkout.parent
    commit = repository(folder / "tool")
    (folder / "data.tar.gz").write_bytes(b"data")
    sources, archives = {"tool": {"git": GIT, "ref": "main"}}, {"data": {"url": ARCHIVE}}
    small_recipe(checkout / "recipes", ["app==1.0"], sources=sources, archives=archives)
    parent = locked(checkout, index, "small")
    assert [one.commit for one in parent.sources] == [commit]
    git: list[str | Path] = [
        "git",
        "-C",
        folder / "tool",
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@example.test",
    ]
    Programs().capture([*git, "commit", "--quiet", "--allow-empty", "--message", "two"])
    (folder / "data.tar.gz").write_bytes(b"other")
    extend(checkout)
    child = locked(checkout, index, "child")
    assert (child.sources, child.archives) == (parent.sources, parent.archives)


def test_an_image_has_the_parent_s_digest(index: Index, tmp_path: Path) -> None:
    what = small_recipe(tmp_path, ["app==1.0"])
    then, now = (Small(letter) for letter in "ab")
    parent = lock.resolve(what, asking(tmp_path, index.pip, programs=then))
    child = lock.resolve(what, asking(tmp_path, index.pip, programs=now, parent=parent))
    assert child.base == parent.base
    other = what.model_copy(
        update={"base": recipe.Base(image="127.0.0.1:1/base:2")},
    )
    child = lock.resolve(other, asking(tmp_path, index.pip, programs=now, parent=parent))
    assert child.base.digest == now.digest


def test_an_image_with_another_tag_in_a_parameter_is_another_one(
    index: Index, tmp_path: Path
) -> None:
    """The digest is neither that of the parent's tag, nor that of the tag in the lock."""
    then, now = (Small(letter) for letter in "ab")

    def child(parameters: dict[str, str]) -> recipe.Recipe:
        base = {"image": "127.0.0.1:1/{account}/base:{tag}", "compiler": "127.0.0.1:1/base:devel"}
        return small_recipe(tmp_path, ["app==1.0"], base=base, parameters=parameters)

    what = child({"account": "a", "tag": "1"})
    parent = lock.resolve(what, asking(tmp_path, index.pip, programs=then))
    assert parent.base == LockedImage(image="127.0.0.1:1/{account}/base:1", digest=then.digest)
    other = child({"account": "a", "tag": "2"})
    found = lock.resolve(other, asking(tmp_path, index.pip, programs=now, parent=parent))
    assert (found.base.digest, found.compiler) == (now.digest, parent.compiler)
    silent = lock.resolve(other, asking(tmp_path, index.pip, before=parent, parent=parent))
    assert silent.base.digest is None
    assert silent.unlocked == ("base image 127.0.0.1:1/a/base:2: no registry answered",)
    (first, _) = bases.wanted([(other, parent)])
    assert first.digest is None
    elsewhere = child({"account": "b", "tag": "1"})
    found = lock.resolve(elsewhere, asking(tmp_path, index.pip, programs=now, parent=parent))
    assert found.base == parent.base


def test_an_image_that_is_a_parameter_as_a_whole_has_its_address_in_the_lock(
    index: Index, tmp_path: Path
) -> None:
    facts = {"base": {"image": "{image}"}, "parameters": {"image": "127.0.0.1:1/base:1"}}
    what = small_recipe(tmp_path, ["app==1.0"], **facts)
    found = lock.resolve(what, asking(tmp_path, index.pip, programs=Small("a")))
    assert found.base.image == "127.0.0.1:1/base:1"
