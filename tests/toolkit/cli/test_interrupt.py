"""Ctrl-C before a command has begun, while Python loads its modules."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import SCRIPT

pytestmark = pytest.mark.processes

# Lies where modules are loaded from first, and interrupts the process that loads it.
INTERRUPTING = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
time.sleep(0.1)
raise SystemExit("it went on")
"""


@pytest.mark.parametrize("program", [[SCRIPT], [sys.executable, "-m", "sqshforge"]], ids=str)
@pytest.mark.parametrize("module", ["click", "difflib", "rich"])
def test_an_interrupt_while_it_loads(
    program: list[str | Path], module: str, tmp_path: Path
) -> None:
    (tmp_path / f"{module}.py").write_text(INTERRUPTING)
    (tmp_path / "x.sqsh").write_bytes(b"hsqs" + bytes(100))
    done = subprocess.run(
        [*program, "verify", tmp_path / "x.sqsh"],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (128 + signal.SIGINT, "")
    assert done.stderr.strip() == "interrupted"


def test_an_interrupt_that_is_ignored_stays_so(tmp_path: Path) -> None:
    """A shell ignores it for processes in the background."""
    (tmp_path / "difflib.py").write_text(INTERRUPTING)
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", SCRIPT, "--version"],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr.strip()) == (1, "it went on")
