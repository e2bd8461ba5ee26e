"""Locks on a file system that does not support them: work continues, and says so once."""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sqshforge.host.locks import exclusive, unless_held
from sqshforge.host.terminal import Reporter

NOTE = "note: this file system has no locks: build and pack from one place at a time\n"


@pytest.fixture(autouse=True, params=[errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP])
def without_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates Lustre without `-o flock`, as no such file system can be mounted here."""

    def flock(*_: Any) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_work_goes_on_without_a_lock(tmp_path: Path) -> None:
    said = io.StringIO()
    reporter, done = Reporter(said), []
    for name in ("a", "b"):
        with exclusive(tmp_path / name, "waiting", reporter):
            done.append(name)
    assert done == ["a", "b"] and said.getvalue() == NOTE
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [Path.touch, lambda path: None], ids=["there", "not there"])
def test_what_another_may_work_on_is_left_alone(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "a")
    with unless_held(tmp_path / "a") as is_ours:
        assert not is_ours
    assert list(tmp_path.iterdir()) == []
