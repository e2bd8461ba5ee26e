"""The files and folders that docs/develop/ names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "develop").glob("*.md"))
FOLDERS = (
    "benchmarks|configs|constraints|docs|images|launch|recipes|reference|sqshforge|tests|training"
)
PLACE = re.compile(rf"(?<![\w/.])(?:{FOLDERS})/[\w./-]*\w/?")
YOURS = ("NAME", "FAMILY", "TARGET")  # stand for what a reader adds


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_places_are_there(page: Path) -> None:
    text = re.sub(r"\]\([^)]*\)", "", page.read_text())
    places = {one for one in PLACE.findall(text) if not any(name in one for name in YOURS)}
    assert places
    assert not {one for one in places if not (ROOT / one).exists()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_modules_are_there(page: Path) -> None:
    modules = re.findall(r"python -m ((?:tests|benchmarks|reference)[\w.]*)", page.read_text())
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
