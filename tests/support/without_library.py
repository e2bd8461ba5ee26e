"""Leave out the tests that import a library which is not installed.

usage: pytest -p tests.support.without_library --without=NAME

For an old torch that the library cannot be installed with. The tests to leave out are found in the
sources of the tests and of the modules of tests/ that they import, so a new test runs unless it
needs the library. They are reported at the start of the run.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without", default="", metavar="NAME", help="library that is not there")


def pytest_report_header(config: pytest.Config) -> list[str]:
    import torch

    from tests.training.support.runs import ENGINES

    name = config.getoption("without")
    shown = [f"left out, as it imports {name}: {one}" for one in sorted(left_out(name))]
    shown += [
        f"left out, as they take {what}: those marked {mark}" for mark, what in _absent().items()
    ]
    return [f"torch {torch.__version__}, tested with its engines: {', '.join(ENGINES)}", *shown]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    out, absent = left_out(config.getoption("without")), _absent()
    deselected = [
        item
        for item in items
        if item.nodeid.partition("[")[0] in out
        or any(item.get_closest_marker(mark) for mark in absent)
    ]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    where = _named(collection_path)
    return True if where in left_out(config.getoption("without")) else None


def _absent() -> dict[str, str]:
    """Map the marks of what this torch lacks to a description of it."""
    from training import compat

    found = {}
    if compat.fsdp2() is None:
        found["fsdp2"] = "FSDP2"
    if not compat.saves_boxes():
        found["boxes"] = "checkpoints of boxes"
    if version("triton").startswith("2."):
        found["triton"] = "Triton 3.4"
    return found


@functools.cache
def left_out(name: str) -> set[str]:
    """Return the test files, and the single tests of other files, that import a library."""
    found = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            within = f"::{node.name}" if isinstance(node, ast.FunctionDef) else ""
            if any(_takes(module, name) for module in _imported(node)):
                found.add(_named(path) + within)
    return found


def _named(path: Path) -> str:
    return path.relative_to(TESTS.parent).as_posix() if path.is_relative_to(TESTS) else ""


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yield the modules imported anywhere in a piece of source, except relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module.partition(".")[0] == PACKAGE:  # an imported name may be a module, too
                yield from (f"{node.module}.{one.name}" for one in node.names)


@functools.cache
def _takes(module: str, name: str) -> bool:
    """Tell whether a module is the library, or a module of tests/ that imports it on import."""
    top, *rest = module.split(".")
    if top != PACKAGE:
        return top == name
    path = TESTS.joinpath(*rest).with_suffix(".py")
    if not rest or not path.exists():
        return False
    tree = ast.parse(path.read_text())
    at_import = [node for node in tree.body if not isinstance(node, ast.FunctionDef)]
    return any(_takes(other, name) for node in at_import for other in _imported(node))
