"""A folder in which to try the pages of the documentation, as a newcomer has it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


@pytest.fixture
def project(tmp_path: Path, root: Path, packed_image: Path) -> Path:
    """What `make quickstart` leaves; whatever a page writes beside it is removed with the test."""
    place = tmp_path / "project"
    (place / "build").mkdir(parents=True)
    (place / "build" / "cpu-mamba.sqsh").symlink_to(packed_image)
    (place / "launch").symlink_to(root / "launch")
    (place / ".venv").symlink_to(Path(sys.prefix))
    return place


@pytest.fixture
def activated(tmp_path: Path) -> dict[str, str]:
    """The environment after `. .venv/bin/activate`, with its own home."""
    home = tmp_path / "home"
    home.mkdir()
    inherited = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**inherited, "HOME": str(home), "PATH": path, "OMP_NUM_THREADS": "1"}
