"""docs/reference/ agrees with the code; if it does not: make reference."""

from __future__ import annotations

import pytest

from reference.markdown import MARK
from reference.pages import FOLDER, PAGES
from tests.contracts.test_page_lengths import GENERATED

BY_HAND = {"glossary.md"}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_gives(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "make reference"


def test_no_other_page_is_there() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*PAGES, *BY_HAND}


@pytest.mark.parametrize("name", ["recipe-keys.md", "settings.md", "metrics.md"])
def test_everything_has_a_meaning(name: str) -> None:
    meaning = {"recipe-keys.md": 4, "settings.md": 4, "metrics.md": 2}[name]
    rows = [line.split(" | ") for line in PAGES[name]().splitlines() if line.startswith("| `")]
    assert len(rows) > 10
    assert not [row[0] for row in rows if len(row) >= meaning and not row[meaning - 1].strip(" |")]


def test_a_page_tells_that_it_is_generated() -> None:
    assert MARK.startswith(GENERATED)
