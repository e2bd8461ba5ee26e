"""Fixtures that several parts share; everything in them is the real thing."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqshforge.programs import Programs
from sqshforge.progress import Reporter

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout under test."""
    return ROOT


@pytest.fixture(scope="session")
def packed_image() -> Iterator[Path]:
    """build/cpu-mamba.sqsh of this very checkout, built and packed once by buildah."""
    from sqshforge import build, engine, recipe, source, squash

    path = ROOT / "build" / "cpu-mamba.sqsh"
    path.parent.mkdir(exist_ok=True)
    with (path.parent / ".tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of several test processes does the work
        programs, reporter = Programs(), Reporter(quiet=True)
        what = recipe.find("cpu-mamba", ROOT / "recipes")
        built = build.build(what, engine.choose("buildah", programs), ROOT, programs, reporter)
        squash.pack(
            source.parse(built.source, programs),
            path,
            squash.Options.of("shared"),
            programs,
            reporter,
        )
    yield path


@pytest.fixture
def no_docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No docker daemon answers, whatever runs on this machine."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """End with the counts and with the reason of every skipped test, in plain words."""
    counts = {
        name: len(terminalreporter.stats.get(name, []))
        for name in ("passed", "failed", "error", "skipped")
    }
    ran = counts["passed"] + counts["failed"] + counts["error"]
    terminalreporter.section("tests")
    terminalreporter.line(
        f"{ran} ran: {counts['passed']} passed, {counts['failed'] + counts['error']} failed, "
        f"{counts['skipped']} skipped"
    )
    for report in terminalreporter.stats.get("skipped", []):
        terminalreporter.line(f"skipped {report.nodeid}: {report.longrepr[2]}")
