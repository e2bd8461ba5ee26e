"""Each target's page says what its recipe has: versions, architectures, instances, launchers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sqshforge import recipe as recipes
from training.job.instances import TYPES

FOLDER = Path(__file__).parents[2]
RECIPES = FOLDER / "recipes"
TARGETS = recipes.targets(RECIPES)
NUMBER = re.compile(r"\d+(?:\.\w+)+(?:[+-]\w+)*")
FAMILIES = {kind.partition(".")[0] for kind in TYPES} | {"g6"}


def page(target: str) -> str:
    return (FOLDER / "docs" / "targets" / f"{target}.md").read_text()


def rows(text: str, head: str) -> list[list[str]]:
    """The cells of the first table below a line that begins with `head`."""
    _, _, after = text.partition(f"\n{head}")
    table = re.search(r"(?:^\|.*\n)+", after, re.MULTILINE)
    lines = table[0].splitlines()[1:] if table and after else []
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("target", TARGETS)
def test_versions(target: str) -> None:
    """Every version in the table of parts is one of the recipe's or of its lock's."""
    recipe = recipes.whole(RECIPES / f"{target}.yaml")
    lock = json.loads((RECIPES / "locks" / f"{target}.lock").read_text())
    locked = {one["version"] for one in lock["python"]["packages"]}
    table = rows(page(target), "| part | pin |")
    assert table
    for part, pins, *_ in table:
        for version in NUMBER.findall(re.sub(r"[\w.-]+/", "", pins)):  # not an image's host
            assert version in recipe or version in locked, f"{part} {version}"


@pytest.mark.parametrize("target", TARGETS)
def test_pinned_packages(target: str) -> None:
    """A package in the table has the version that is installed."""
    lock = json.loads((RECIPES / "locks" / f"{target}.lock").read_text())
    versions = {one["name"].lower(): one["version"] for one in lock["python"]["packages"]}
    for parts, pins, *_ in rows(page(target), "| part | pin |"):
        for part in parts.lower().split(", "):
            if part in versions and NUMBER.search(pins):
                assert versions[part] in pins, f"{part} is {versions[part]}"


@pytest.mark.parametrize("target", TARGETS)
def test_launchers(target: str) -> None:
    said = re.search(r"^Launchers: (.*)\.$", page(target), re.MULTILINE)
    assert said is not None
    assert re.findall(r"`(\w+)`", said[1]) == list(recipes.find(target, RECIPES).launchers)


@pytest.mark.parametrize("target", TARGETS)
def test_architectures(target: str) -> None:
    """The table has those that the recipe compiles for, with instances that are known."""
    recipe = recipes.find(target, RECIPES)
    table = rows(page(target), "| architecture | GPU |")
    if not table:
        return
    assert recipe.cuda is not None
    assert [row[0] for row in table] == list(recipe.cuda.architectures)
    for _, _, instances in table:
        for family in re.findall(r"\b(?:p|g|trn)\d[\w-]*(?=[ ,)]|$)", instances):
            assert family in FAMILIES, family


def test_targets_that_compile_say_for_what() -> None:
    for target in ("cuda-mamba", "cuda13-mamba"):
        assert rows(page(target), "| architecture | GPU |")
