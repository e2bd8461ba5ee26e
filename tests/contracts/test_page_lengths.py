"""Pages of the documentation are short enough to be read; generated ones may be longer."""

from __future__ import annotations

from pathlib import Path

MOST = 200
GENERATED = "<!-- Written by `make reference`"


def test_no_page_is_too_long(root: Path) -> None:
    lines = {
        str(page.relative_to(root)): len(text.splitlines())
        for page in (root / "docs").rglob("*.md")
        if not (text := page.read_text()).startswith(GENERATED)
    }
    assert lines
    assert not {name: count for name, count in lines.items() if count > MOST}
