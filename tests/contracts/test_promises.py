"""docs/develop/promises.md: every test and benchmark that the page names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "develop" / "promises.md"


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_what_holds_a_promise_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE.read_text())
    assert len(named) > 20
    for file, test in named:
        assert not test or test in functions(ROOT / file), f"{file}::{test}"


def test_its_benchmarks_are_there() -> None:
    named = re.findall(r"`benchmarks\.(\w+)`", PAGE.read_text())
    assert named and all((ROOT / "benchmarks" / f"{one}.py").exists() for one in named)
