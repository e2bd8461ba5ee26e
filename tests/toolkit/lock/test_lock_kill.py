"""If `sqshforge lock` is killed, the next one removes the folder that apt worked in."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import checkouts, containers, processes

pytestmark = pytest.mark.processes

MARK = "SQSHFORGE_TEST_LOCK"


@contextlib.contextmanager
def locking(root: Path, temporary: Path) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "sqshforge", "lock", checkouts.TARGET, "--check"]
    environment = {**os.environ, MARK: str(root), "TMPDIR": str(temporary)}
    with subprocess.Popen(
        argv, cwd=root, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            processes.kill(processes.having({MARK: str(root)}))


def folders(temporary: Path) -> set[str]:
    return {path.name for path in temporary.glob("sqshforge-apt-*")}


def at_work(process: subprocess.Popen[str], temporary: Path, left: set[str]) -> bool:
    """Tell whether apt has its folder, other than those left before."""
    if process.poll() is not None:
        raise RuntimeError(process.communicate()[1])
    return bool(folders(temporary) - left)


def test_the_next_one_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    root, temporary = checkouts.copy(tmp_path / "x"), tmp_path / "temporary"
    temporary.mkdir()
    others = temporary / "sqshforge-apt-another-machine.1.0123456789ab"
    others.mkdir()
    with locking(root, temporary) as process:
        assert containers.until(lambda: at_work(process, temporary, {others.name}), 300)
        process.kill()
        process.wait()
    left = folders(temporary)
    assert len(left) == 2
    with locking(root, temporary) as process:
        assert containers.until(lambda: at_work(process, temporary, left), 300)
        assert folders(temporary) & left == {others.name}
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert folders(temporary) == {others.name}


def test_one_that_runs_keeps_its_folder(tmp_path: Path) -> None:
    root, temporary = checkouts.copy(tmp_path / "x"), tmp_path / "temporary"
    temporary.mkdir()
    with locking(root, temporary) as first:
        assert containers.until(lambda: at_work(first, temporary, set()), 300)
        held = folders(temporary)
        os.kill(first.pid, signal.SIGSTOP)
        with locking(root, temporary) as second:
            assert containers.until(lambda: at_work(second, temporary, held), 300)
            assert folders(temporary) > held
