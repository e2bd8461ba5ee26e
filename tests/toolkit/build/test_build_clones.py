"""Two checkouts on one machine that share an engine each have their own image."""

from __future__ import annotations

from pathlib import Path

import pytest

from sqshforge.build.build import name_of
from sqshforge.engine import Engine
from tests.support import checkouts
from tests.support.engines import docker_host_fixture as docker_host_fixture
from tests.support.engines import engine_fixture as engine_fixture
from tests.support.engines import storage_fixture as storage_fixture

pytestmark = pytest.mark.processes


def test_each_keeps_its_image_and_stays_up_to_date(engine: Engine, tmp_path: Path) -> None:
    roots = [
        checkouts.copy(tmp_path / name, f"RUN echo {name} > /made-by") for name in ("one", "two")
    ]
    first, second = (checkouts.build(engine, root) for root in roots)
    assert not first.up_to_date and not second.up_to_date
    assert first.name != second.name and first.image.id != second.image.id
    for root, built in zip(roots, (first, second), strict=True):
        reporter = checkouts.Listening()
        again = checkouts.build(engine, root, reporter)
        assert again.up_to_date and reporter.heard == []
        assert (again.name, again.image.id) == (built.name, built.image.id)
        place = root / "found"
        place.mkdir()
        (root / "training" / "edited.py").write_text(f"EDIT = '{root.name}'\n")
        edited = checkouts.build(engine, root, reporter)
        # Only what the edit touches runs: the other checkout's build has pushed nothing out of the
        # cache.
        assert not any(step.startswith("RUN ") for step in reporter.executed()), reporter.heard
        engine.copy_out(edited.name, "/sqshforge/training", place)
        assert (place / "edited.py").read_text() == f"EDIT = '{root.name}'\n"


def test_the_name_is_that_of_the_checkout_however_it_is_reached(tmp_path: Path) -> None:
    (tmp_path / "checkout").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "checkout")
    name = name_of("cpu-mamba", tmp_path / "checkout")
    assert name.startswith("localhost/sqshforge-cpu-mamba:")
    assert name_of("cpu-mamba", tmp_path / "link") == name
    assert name_of("cpu-mamba", tmp_path / "other") != name
