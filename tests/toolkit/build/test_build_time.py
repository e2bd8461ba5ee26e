"""SOURCE_DATE_EPOCH, the creation time of an image."""

from __future__ import annotations

from pathlib import Path

import pytest

from sqshforge.engine import Engine
from sqshforge.errors import RequestError
from tests.support import checkouts
from tests.support.engines import docker_host_fixture as docker_host_fixture
from tests.support.engines import engine_fixture as engine_fixture
from tests.support.engines import storage_fixture as storage_fixture

pytestmark = pytest.mark.processes

EPOCH = "1700000000"


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
