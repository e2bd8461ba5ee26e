"""Nothing in the project uses the words that CONTRIBUTING.md has better ones for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("sqshforge", "training", "benchmarks", "tests", "launch", "docs", "images", "recipes")
LIST = "CONTRIBUTING.md"
SUFFIXES = (".py", ".md", ".j2", ".sh", ".sbatch", ".yaml", ".conf")


def unwanted() -> list[str]:
    """Return the words in the right column of the list."""
    _, _, table = (ROOT / LIST).read_text().partition("| use | not |\n|---|---|\n")
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return [word for _, words in rows for word in words.split(", ")]


def sources() -> Iterator[Path]:
    """Yield the files that people read, except for the list itself."""
    yield from (path for path in ROOT.iterdir() if path.suffix in SUFFIXES and path.name != LIST)
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)


def test_words_that_have_a_better_one_are_not_used() -> None:
    words = unwanted()
    assert len(words) > 5
    # Also match words between underscores, as in names.
    pattern = re.compile(rf"(?<![a-z])(?:{'|'.join(words)})(?![a-z])", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert found == []
