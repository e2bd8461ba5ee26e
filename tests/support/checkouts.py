"""Copies of the checkout that tests may edit, and what a build in one of them prints."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from sqshforge import lock, recipe
from sqshforge.build import build as building
from sqshforge.engine import Engine
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter, Tracker
from tests.conftest import ROOT
from tests.support import processes

TARGET = "cpu-mamba"
MARK = "SQSHFORGE_TEST_BUILD"
HEAD = """{% import "fragments/apt.j2" as apt %}
ARG BASE
FROM ${BASE} AS image
LABEL io.sqshforge.target={{ recipe.target }}
"""
# What fragments/training.j2 does, except the bill of materials, which needs a Python in the image.
PAYLOAD = """COPY meta/ /sqshforge/meta/
COPY payload/ /sqshforge/
"""


def copy(place: Path, lines: str | None = None) -> Path:
    """Copy the checkout, with the same cache of bases and installers.

    With `lines`, these are all that its Dockerfile has between the base and the copies of our own
    files.
    """
    for name in ("sqshforge", "recipes", "images", "launch", "patches", "training"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "LICENSE", place)
    _share(place)
    if lines is not None:
        (place / "images" / f"{TARGET}.Dockerfile.j2").write_text(f"{HEAD}{lines}\n{PAYLOAD}")
    return place


def clone(place: Path) -> Path:
    """Make a fresh clone with this checkout's changes and the downloads of its builds."""
    git = ["git", "-C", str(ROOT)]
    programs = Programs()
    programs.capture(["git", "clone", "--quiet", ROOT, place])
    changed = programs.capture([*git, "ls-files", "-z", "-dmo", "--exclude-standard"])
    for name in filter(None, changed.split("\0")):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).unlink(missing_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, place / name)
    _share(place)
    return place


def _share(place: Path) -> None:
    (place / "build").mkdir()
    for name in ("bases", "vendor"):
        (ROOT / "build" / name).mkdir(parents=True, exist_ok=True)
        (place / "build" / name).symlink_to(ROOT / "build" / name)


def bare(place: Path) -> Path:
    """Make a fresh clone in a new folder, where nothing has been set up."""
    place.mkdir()
    folders = ("constraints", "sqshforge", "recipes", "images", "launch", "patches", "training")
    for name in folders:
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "Makefile", "setup.sh", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, place / name)
    return place


class Listening(Reporter):
    """Keeps every line that an engine prints."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.heard: list[str] = []

    @contextlib.contextmanager
    def track(
        self, name: str, total: float | None = None, unit: str = "bytes"
    ) -> Iterator[Tracker]:
        yield _Noting(name, self.heard)

    def executed(self) -> list[str]:
        """Return the Dockerfile's instructions that did not come from the engine's cache."""
        done: list[str] = []
        for line in self.heard:
            # buildah: "[1/2] STEP 2/3: RUN x"; docker: "[image 2/3] RUN x"
            step = re.match(r"(?:\[[^\]]*\d+/\d+\] )?(?:STEP \d+/\d+: )?([A-Z]{3,} .*)", line)
            if step:
                done.append(step[1])
            elif line.startswith("--> Using cache") or line == "CACHED":
                done.pop()
        return [one for one in done if one.startswith(("RUN ", "COPY "))]


class _Noting(Tracker):
    def __init__(self, name: str, heard: list[str]) -> None:
        super().__init__(name, None, "")
        self._heard = heard

    def note(self, doing: str) -> None:
        self._heard.append(doing)


def build(engine: Engine, root: Path, reporter: Reporter | None = None) -> building.Built:
    """Build the target from a checkout."""
    what = recipe.find(TARGET, root / "recipes")
    return building.build(
        what,
        lock.load(what, root / "recipes"),
        engine,
        root,
        Programs(),
        reporter or Reporter(quiet=True),
    )


@contextlib.contextmanager
def command(root: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run `sqshforge build` of a checkout in the background; nothing outlives the block."""
    mark = uuid.uuid4().hex
    argv = [sys.executable, "-m", "sqshforge", "build", TARGET, *words]
    with subprocess.Popen(
        argv,
        cwd=root,
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            processes.kill(processes.having({MARK: mark}))
