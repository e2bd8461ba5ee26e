"""The systems to try, and the table of what was run where."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqshforge.project import cache_home
from tests.distros.systems import SYSTEMS
from tests.support.page_tables import PageTable

KEPT = cache_home() / "systems"  # determined before the tests get their own cache
USERS = ("root", "user")
COLUMNS = ("Python", "builder", "make quickstart", "again", "make test's set-up")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Try what SYSTEMS and USERS name, such as SYSTEMS="debian-13 ubuntu-22.04"; by default all."""
    for name, all_of_them in (("system", SYSTEMS), ("user", USERS)):
        if name in metafunc.fixturenames:
            asked = os.environ.get(f"{name.upper()}S", "").split()
            unknown = set(asked) - set(all_of_them)
            assert not unknown, f"unknown {name}: {', '.join(unknown)}"
            metafunc.parametrize(name, asked or list(all_of_them))


@pytest.fixture(scope="session")
def kept() -> Path:
    """The folder that keeps the roots of all systems between runs."""
    return KEPT


@pytest.fixture(scope="session")
def results(root: Path) -> Iterator[PageTable]:
    """What was run where; written into the table in docs/start/machines.md at the end."""
    rows = [(system.title, user) for system in SYSTEMS.values() for user in USERS]
    found = PageTable("test-distros", ("system", "user"), COLUMNS, rows)
    yield found
    found.write(root / "docs" / "start" / "machines.md")
