"""Every link of a page leads to a file that is there, and to a heading that it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "launch", "recipes", "patches", "constraints")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def text_of(page: Path) -> str:
    """A page without its code, in which a bracket is no link."""
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links, as GitHub makes it of their words."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", one.lower()) for one in found)
    return {one.replace(" ", "-") for one in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for place, anchor in LINK.findall(text_of(page)):
        target = page.parent / place if place else page
        assert target.exists(), place
        assert not anchor or anchor in anchors(target), f"{place}#{anchor}"
