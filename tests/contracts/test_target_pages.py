"""Each target's page agrees with its recipe: versions, architectures, instances, launchers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sqshforge import recipe as recipes
from training.job.machine.instances import TYPES
from training.job.machine.software import Version, parse_version

FOLDER = Path(__file__).parents[2]
RECIPES = FOLDER / "recipes"
TARGETS = recipes.targets(RECIPES)
NUMBER = re.compile(r"\d+(?:\.\w+)+(?:[+-]\w+)*")
# The aws-ofi-nccl in EFA's installers, according to AWS's release notes for EFA.
BUNDLED = {"1.48.0": "1.19.0"}
FAMILIES = {kind.partition(".")[0] for kind in TYPES} | {"g6"}


def page(target: str) -> str:
    return (FOLDER / "docs" / "images" / "targets" / f"{target}.md").read_text()


def rows(text: str, head: str) -> list[list[str]]:
    """Return the cells of the first table below a line that begins with `head`."""
    _, _, after = text.partition(f"\n{head}")
    table = re.search(r"(?:^\|.*\n)+", after, re.MULTILINE)
    lines = table[0].splitlines()[1:] if table and after else []
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("target", TARGETS)
def test_versions(target: str) -> None:
    """Every version in the table of parts is in the recipe or in its lock."""
    recipe = recipes.whole(RECIPES / f"{target}.yaml")
    lock = json.loads((RECIPES / "locks" / f"{target}.lock").read_text())
    locked = {one["version"] for one in lock["python"]["packages"]}
    table = rows(page(target), "| part | pin |")
    assert table
    for part, pins, *_ in table:
        for version in NUMBER.findall(re.sub(r"[\w.-]+/", "", pins)):  # without an image's host
            assert version in recipe or version in locked, f"{part} {version}"


@pytest.mark.parametrize("target", TARGETS)
def test_pinned_packages(target: str) -> None:
    """A package in the table has the installed version."""
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
    """The table has the architectures that the recipe compiles for, and known instances."""
    recipe = recipes.find(target, RECIPES)
    table = rows(page(target), "| architecture | GPU |")
    if not table:
        return
    assert recipe.cuda is not None
    assert [row[0] for row in table] == list(recipe.cuda.architectures)
    for _, _, instances in table:
        for family in re.findall(r"\b(?:p|g|trn)\d[\w-]*(?=[ ,)]|$)", instances):
            assert family in FAMILIES, family


def plugin_of(target: str) -> Version:
    """Return a target's aws-ofi-nccl: compiled from source, or from the EFA installer; or none."""
    recipe = recipes.find(target, RECIPES)
    if "aws-ofi-nccl" in recipe.sources:
        return parse_version(recipe.sources["aws-ofi-nccl"].ref)
    installer = recipe.archives.get("efa") if recipe.accelerator == "cuda" else None
    number = NUMBER.search(installer.file.removesuffix(".tar.gz")) if installer else None
    return parse_version(BUNDLED[number[0]]) if number else ()


@pytest.mark.parametrize("target", TARGETS)
def test_instances_are_those_that_the_plugin_knows(target: str) -> None:
    """A page promises EFA on an instance only if the image's aws-ofi-nccl supports it."""
    table, plugin = rows(page(target), "| architecture | GPU |"), plugin_of(target)
    for _, _, instances in table:
        families = set(re.findall(r"\b(?:p|g)\d[\w-]*(?=[ ,)]|$)", instances))
        for type in TYPES.values():
            if type.family in families and type.fabric.efa:
                assert plugin, f"{target} has no plugin"
                assert plugin >= parse_version(type.fabric.plugin), type.type


@pytest.mark.parametrize("target", TARGETS)
def test_the_plugins_version_is_the_pages(target: str) -> None:
    pins = [row[1] for row in rows(page(target), "| part | pin |") if row[0] == "aws-ofi-nccl"]
    assert [parse_version(pin) for pin in pins] in ([], [plugin_of(target)])
    known = rows((FOLDER / "docs/training/nodes.md").read_text(), "| image | aws-ofi-nccl |")
    versions = [row[1] for row in known if re.search(rf"\b{target}\b", row[0])]
    if plugin_of(target):
        assert [parse_version(one) for one in versions] == [plugin_of(target)]


def test_first_versions_are_those_of_the_table() -> None:
    """docs/training/nodes.md and the code agree on the first aws-ofi-nccl for each instance."""
    page = (FOLDER / "docs/training/nodes.md").read_text()
    table = rows(page, "| instances | first aws-ofi-nccl")
    versions = {name: parse_version(first) for names, first in table for name in names.split(", ")}
    for type in TYPES.values():
        if first := parse_version(type.fabric.plugin):
            exact = versions.get(type.family)
            assert exact == first or first <= versions[type.type], type.type


def test_targets_that_compile_say_for_what() -> None:
    for target in ("cuda-mamba", "cuda13-mamba"):
        assert rows(page(target), "| architecture | GPU |")
