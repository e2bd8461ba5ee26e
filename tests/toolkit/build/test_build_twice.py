"""The same target built twice, in two places and storages: the same layers, and the same file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sqshforge.engine import Engine
from sqshforge.errors import RequestError
from tests.support import checkouts, engines
from tests.support.engines import docker_host_fixture as docker_host_fixture
from tests.support.engines import engine_fixture as engine_fixture
from tests.support.engines import storage_fixture as storage_fixture

pytestmark = pytest.mark.processes

EPOCH = "1700000000"  # 2023-11-14 22:13:20 UTC


def sqshforge(root: Path, *words: str | Path) -> str:
    """What a command of a checkout says."""
    done = subprocess.run(
        [sys.executable, "-m", "sqshforge", *words],
        cwd=root,
        env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH, "SQSHFORGE_CACHE": str(root / "cache")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def made(place: Path) -> Path:
    """A sqsh of the target, made from nothing but what package archives give."""
    root = checkouts.copy(place / "checkout")
    (root / "build/bases").unlink()  # which other builds of this machine have filled
    (place / "engine").mkdir()
    with engines.storage(place / "engine"):
        sqshforge(root, "build", checkouts.TARGET, "--engine", "buildah")
        words = ("pack", checkouts.TARGET, "--engine", "buildah", "-o")
        sqshforge(root, *words, place / "image.sqsh", "--profile", "fast")
    return place / "image.sqsh"


@pytest.mark.timeout(1200)
@pytest.mark.long
def test_the_same_layers_and_the_same_file(tmp_path: Path) -> None:
    places = [tmp_path / "first", tmp_path / "elsewhere"]
    for place in places:
        place.mkdir()
    files = [made(place) for place in places]
    seen = [json.loads(sqshforge(places[0] / "checkout", "inspect", f, "--json")) for f in files]
    layers = [one["record"]["image"]["layers"] for one in seen]
    assert layers[0] == layers[1] and len(layers[0]) > 1
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_build_for_another_time_is_another_build(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = checkouts.copy(tmp_path / "checkout", "RUN date > /built")
    done = []
    for epoch in (EPOCH, EPOCH, None, None):
        if epoch is None:
            monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
        else:
            monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
        done.append(checkouts.build(engine, root))
    assert [one.up_to_date for one in done] == [False, True, False, True]


def test_a_time_that_is_none_is_refused(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(RequestError, match="SOURCE_DATE_EPOCH is 'yesterday'"):
        checkouts.build(engine, checkouts.copy(tmp_path / "checkout", ""))
