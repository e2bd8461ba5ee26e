"""`sqshforge outdated` from outside: the table, JSON, and its exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sqshforge import recipe
from sqshforge.host.programs import Programs, Result
from tests.support import checkouts
from tests.support.command_line import sqshforge
from tests.support.web_servers import Index, small_recipe, wheel
from tests.support.web_servers import direct_fixture as direct_fixture
from tests.support.web_servers import new_index_fixture as new_index_fixture

pytestmark = pytest.mark.processes

NewIndex = Callable[..., Index]


def outdated(checkout: Path, index: Index, *words: str) -> Result:
    """Run the command in a copy of the checkout, with one index."""
    settings = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": index.url}
    settings |= {"PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    argv = [sys.executable, "-m", "sqshforge", "outdated", *words]
    done = Programs().attempt(argv, cwd=checkout, env=settings)
    assert "Traceback" not in done.err
    return done


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout with two recipes; the second one extends the first."""
    copy = checkouts.copy(tmp_path / "checkout")
    for path in (copy / "recipes").glob("*.yaml"):
        path.unlink()
    small_recipe(copy / "recipes", ["app==1.0", "tool==1.0"])
    path = copy / "recipes" / "small.yaml"
    path.write_text(path.read_text().replace("- app==1.0", "- app==1.0  # for the old tool"))
    child = "target: child\nextends: small\ntitle: a test\n"
    (copy / "recipes" / "child.yaml").write_text(child)
    return copy


@pytest.fixture
def index(new_index: NewIndex) -> Index:
    ones = [wheel("app"), wheel("app", "2.0"), wheel("tool"), wheel("pip", "25.3")]
    return new_index(*ones)


def test_the_table_has_what_is_not_the_newest(checkout: Path, index: Index) -> None:
    done = outdated(checkout, index, "small")
    assert done.code == 0, done.err
    head, image, app, _, total, following = done.out.splitlines()
    assert head.split() == ["pin", "pinned", "fits", "newest", "held", "back", "by"]
    assert image.split()[:3] == ["image", "127.0.0.1:1/base", "1"]
    assert "its registry does not answer" in image
    assert app.split()[:4] == ["app", "1.0", "2.0", "2.0"]
    assert app.rstrip().endswith("# for the old tool")
    assert total == "small: 4 pins: 2 newest, 1 outdated, 1 not asked"
    assert following == "next: make lock TARGET=small"


def test_all_targets_share_the_rows_in_which_they_agree(checkout: Path, index: Index) -> None:
    done = outdated(checkout, index)
    assert done.code == 0, done.err
    rows = [line for line in done.out.splitlines() if line.startswith("app ")]
    assert len(rows) == 1
    assert rows[0].split("# ")[1].split() == ["for", "the", "old", "tool", "child,", "small"]
    assert "all targets: 8 pins: 4 newest, 2 outdated, 2 not asked" in done.out
    assert sum(path == "/simple/app/" for path, _ in index.web.asked) <= 3


def test_of_all_targets_those_of_a_platform_are_asked(checkout: Path, index: Index) -> None:
    path = checkout / "recipes" / "child.yaml"
    path.write_text(f"{path.read_text()}platforms: [linux/amd64, linux/arm64]\n")
    done = outdated(checkout, index, "--json", "--platform", "linux/arm64")
    assert done.code == 0, done.err
    assert {one["target"] for one in json.loads(done.out)} == {"child"}
    done = outdated(checkout, index, "small", "--platform", "linux/arm64")
    assert done.code == 2 and "small is not made for linux/arm64" in done.err


def test_json_has_every_pin(checkout: Path, index: Index) -> None:
    done = outdated(checkout, index, "small", "--json")
    assert done.code == 0, done.err
    found = {one["name"]: one for one in json.loads(done.out)}
    assert found["app"] == {
        "target": "small",
        "kind": "package",
        "name": "app",
        "pinned": "1.0",
        "fits": "2.0",
        "newest": "2.0",
        "moved": "",
        "held_by": [],
        "comment": "for the old tool",
        "silent": "",
        "state": "outdated",
    }
    assert found["tool"]["state"] == "newest"


def test_where_nothing_answers_it_is_exit_code_3(checkout: Path, index: Index) -> None:
    index.web.stop()
    for words in (["small"], ["small", "--json"]):
        done = outdated(checkout, index, *words)
        assert done.code == 3
        assert "no source of versions answered:" in done.err
        assert "the package index does not answer" in done.err
        assert "its registry does not answer" in done.err


def test_the_pins_of_cpu_mamba_are_asked_of_pips_own_indexes(root: Path) -> None:
    done = sqshforge("outdated", "cpu-mamba", "--json")
    assert done.code == 0, done.err
    found = {one["name"]: one for one in json.loads(done.out)}
    python = recipe.find("cpu-mamba", root / "recipes").python
    packages = {name: one for name, one in found.items() if one["kind"] == "package"}
    assert packages.keys() == {recipe.normalize(one) for one in python.packages} | {"pip"}
    assert all(one["newest"] for one in packages.values())
    assert found["numpy"]["fits"]
    assert found["bookworm"]["kind"] == "Debian"
    assert "+cpu" in found["torch"]["pinned"]


def test_an_unknown_target_is_reported() -> None:
    done = sqshforge("outdated", "cpu-mambo")
    assert done.code == 2
    assert "did you mean cpu-mamba?" in done.err
