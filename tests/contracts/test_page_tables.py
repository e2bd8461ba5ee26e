"""Tables that heavy tests write into the docs: what was not run keeps its earlier content."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.page_tables import PageTable


def table(*rows: tuple[str, ...]) -> PageTable:
    return PageTable("sizes", ("target",), ("image", "smoke test"), rows)


def test_a_row_that_was_not_run_keeps_its_figures_and_a_new_one_says_so(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- sizes: begin -->\n<!-- sizes: end -->\nafter\n")
    first = table(("a",), ("b",))
    first.note("a", image="1 GB", smoke_test="2 s")
    first.write(page)
    second = table(("a",), ("c",))
    second.note("c", image="3 GB")
    second.write(page)
    assert page.read_text() == (
        "before\n<!-- sizes: begin -->\n"
        "| target | image | smoke test |\n|---|---|---|\n"
        "| a | 1 GB | 2 s |\n| c | 3 GB | not run |\n"
        "<!-- sizes: end -->\nafter\n"
    )


def test_a_page_without_the_place_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no place\n")
    with pytest.raises(AssertionError, match="has no place for <!-- sizes: begin -->"):
        table(("a",)).write(page)
    assert page.read_text() == "no place\n"


@pytest.mark.parametrize(
    "page, marker", [("start/machines.md", "test-distros"), ("images/targets.md", "test-images")]
)
def test_the_pages_have_their_places(root: Path, page: str, marker: str) -> None:
    text = (root / "docs" / page).read_text()
    assert text.count(f"<!-- {marker}: begin -->") == text.count(f"<!-- {marker}: end -->") == 1
