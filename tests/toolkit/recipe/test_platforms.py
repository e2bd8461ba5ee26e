"""Recipes for several platforms: differences are merged in, one is chosen, faults are reported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from sqshforge import lock, recipe
from sqshforge.errors import RequestError
from tests.toolkit.recipe.test_recipe import GOOD, faults, write

BOTH = f"""\
{GOOD}env: {{SAYS: one, STAYS: same}}
platforms: [linux/amd64, linux/arm64]
per_platform:
  linux/arm64:
    python:
      packages: [numpy==2.3.5]
    env: {{SAYS: other}}
"""


def machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine has another architecture."""
    real = os.uname()
    monkeypatch.setattr("os.uname", lambda: os.uname_result((*real[:4], name)))


def test_what_differs_is_laid_over(tmp_path: Path) -> None:
    path = write(tmp_path, BOTH)
    plain, arm = recipe.load(path, "linux/amd64"), recipe.load(path, "linux/arm64")
    assert (plain.name, arm.name) == ("test", "test.arm64")
    assert (plain.platform.name, arm.platform.name) == ("linux/amd64", "linux/arm64")
    assert (plain.python.packages, arm.python.packages) == (("numpy==2.3.4",), ("numpy==2.3.5",))
    assert plain.env == {"SAYS": "one", "STAYS": "same"}
    assert arm.env == {"SAYS": "other", "STAYS": "same"}
    assert recipe.platforms_of("test", tmp_path) == ("linux/amd64", "linux/arm64")


def test_a_recipe_that_names_none_is_for_x86(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert recipe.load(path).platform.name == "linux/amd64"
    assert recipe.platforms_of("test", tmp_path) == ("linux/amd64",)


def test_another_platform_leaves_the_first_one_s_lock_as_it_is(tmp_path: Path) -> None:
    before = lock.inputs(recipe.load(write(tmp_path, f"{GOOD}env: {{A: b}}")))
    path = write(tmp_path, BOTH)
    assert lock.inputs(recipe.load(path, "linux/amd64")) == before
    assert lock.inputs(recipe.load(path, "linux/arm64")) != before


def test_by_itself_it_is_the_machine_s_own_else_the_recipe_s_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, BOTH)
    for name, platform in (("aarch64", "arm64"), ("x86_64", "amd64"), ("riscv64", "amd64")):
        machine(name, monkeypatch)
        assert recipe.load(path).platform.name == f"linux/{platform}"
    turned = write(tmp_path, BOTH.replace("[linux/amd64, linux/arm64]", "[linux/arm64]"))
    assert recipe.load(turned).platform.name == "linux/arm64"


def test_a_platform_that_the_recipe_does_not_have_is_one_error(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    with pytest.raises(RequestError, match="test is not made for linux/arm64") as caught:
        recipe.find("test", tmp_path, platform="linux/arm64")
    assert str(path) in caught.value.where
    assert caught.value.fix.startswith("--platform linux/amd64, or add it there")


def test_the_text_for_inside_an_image_is_that_of_its_platform(tmp_path: Path) -> None:
    path = write(tmp_path, BOTH)
    assert recipe.whole(path, None, "linux/amd64") == path.read_text()
    data = yaml.safe_load(recipe.whole(path, None, "linux/arm64"))
    assert data["python"]["packages"] == ["numpy==2.3.5"]
    assert data["platforms"] == ["linux/arm64"]
    assert "per_platform" not in data


def test_a_recipe_that_extends_one_has_its_platforms_and_what_differs(tmp_path: Path) -> None:
    write(tmp_path, BOTH, "parent")
    child = "target: {name}\nextends: parent\ntitle: b\npython: {packages: [pip==1]}\n"
    arm = recipe.load(write(tmp_path, child, "child"), "linux/arm64")
    assert arm.python.packages == ("pip==1", "numpy==2.3.5")
    assert arm.env["SAYS"] == "other"


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (
            ("[numpy==2.3.5]", "[numpy>=2]"),
            "per_platform.linux/arm64.python.packages[1] (line 16): is 'numpy>=2'; must match",
        ),
        (
            ("env: {SAYS: other}", "envv: {SAYS: other}"),
            "per_platform.linux/arm64.envv (line 17): unknown key; did you mean env?",
        ),
        (
            ("    env: {SAYS: other}", "    extends: x"),
            "per_platform (line 13): linux/arm64.extends: is the same on every platform",
        ),
        (
            ("[linux/amd64, linux/arm64]", "[linux/amd64]"),
            "per_platform has linux/arm64, which is not in platforms",
        ),
        (
            ("[linux/amd64, linux/arm64]", "[linux/amd65, linux/arm64]"),
            "platforms[0] (line 12): is 'linux/amd65'; allowed: 'linux/amd64' or 'linux/arm64'",
        ),
        (("[linux/amd64, linux/arm64]", "[]"), "platforms (line 12): "),
        (("platforms: [linux/amd64, linux/arm64]", "platform: linux/amd64"), "mean platforms?"),
    ],
)
def test_faults_are_reported_where_they_stand(
    tmp_path: Path, change: tuple[str, str], shown: str
) -> None:
    assert shown in faults(write(tmp_path, BOTH.replace(*change)))
