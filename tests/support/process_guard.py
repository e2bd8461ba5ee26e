"""Enforce the promise of `make check` that its tests start no process.

A test that starts processes must be marked `processes`; without the mark it fails, in any run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

OF_EVERY_RUN = {"overlays"}  # asks buildah, if installed, how it stores images
ONCE = {"fc-list"}  # matplotlib uses it to find a user's fonts, the first time that it is imported
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}


class Guard:
    """Fails a test that starts a process while it is on; audit hooks cannot be removed."""

    on = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event in STARTS and not ONCE.intersection(arguments[:1]):
            self.on = False  # off: reporting the failure may start one
            pytest.fail(f"starts a process ({event}): mark the test `processes`", pytrace=True)


GUARD = Guard()
sys.addaudithook(GUARD)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Iterator[None]:
    """Exempt what every run sets up, whichever tests it has: it belongs to no test."""
    before, GUARD.on = GUARD.on, GUARD.on and fixturedef.argname not in OF_EVERY_RUN
    try:
        return (yield)
    finally:
        GUARD.on = before


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    GUARD.on = item.get_closest_marker("processes") is None and not _is_heavy(item)
    try:
        return (yield)
    finally:
        GUARD.on = False


def _is_heavy(item: pytest.Item) -> bool:
    """Tell whether the test is in a folder that only runs if it is named."""
    named = item.config.getini("norecursedirs")
    return any(item.path.is_relative_to(item.config.rootpath / one) for one in named)
