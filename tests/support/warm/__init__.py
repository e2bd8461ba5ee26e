"""A python that has torch loaded: a test that starts many processes takes a third of the time.

`python()` is a program that does what python does with the words that follow it. It has no torch of
its own; it asks a server, one for each process of tests, which forks itself for every request. What
must be as users have it, as how signals reach all, starts `sys.executable`.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.processes import descendants

HERE = Path(__file__).parent


def python() -> dict[str, str]:
    """The variables of a process that is to start the program.

    PYTHON_EXEC is the program, which torchrun takes for its processes too.
    """
    return {"PYTHON_EXEC": str(HERE / "python"), "WARM_PYTHON": _server()[1]}


def forked() -> list[int]:
    """The processes that stand behind all those of `python()`, and what is below them."""
    return descendants(_server()[0].pid)


@functools.cache
def _server() -> tuple[subprocess.Popen[bytes], str]:
    """Start the server, for as long as this process lives; where it listens."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    path = folder / "socket"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.warm.server", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=HERE.parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert server.stdin is not None and server.stdout is not None
    assert server.stdout.readline() == b"ready\n"

    def end() -> None:
        server.communicate()  # it ends with its standard input
        path.unlink()
        folder.rmdir()

    atexit.register(end)
    return server, str(path)
