"""The errors that docs/start/troubleshooting.md quotes still exist in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.contracts.test_error_messages import LIST, ROOT

PAGE = ROOT / "docs" / "start" / "troubleshooting.md"
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)


def messages() -> list[str]:
    """Return the errors of the packages, and the lines of the launchers."""
    templates = sorted((ROOT / "launch" / "template").glob("*.j2"))
    return [line for file in (LIST, *templates) for line in Path(file).read_text().splitlines()]


def test_there_are_some() -> None:
    assert len(QUOTED) >= 20
    assert len(set(QUOTED)) == len(QUOTED)


@pytest.mark.parametrize("quoted", QUOTED)
def test_an_error_is_still_worded_so(quoted: str) -> None:
    """`...` stands for the variable parts."""
    words = re.compile(".*".join(map(re.escape, quoted.split("..."))))
    assert any(words.search(line) for line in messages())
