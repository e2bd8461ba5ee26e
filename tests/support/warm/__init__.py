"""A Python with torch already loaded: tests that start many processes take a third of the time.

`python()` gives a program that does what python does with the words that follow it. It has no torch
of its own; it asks a server, one for each process of tests, which forks itself for every request.
What must be as users have it, such as how signals reach all processes, starts `sys.executable`.
"""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.processes import descendants

HERE = Path(__file__).parent


def python() -> dict[str, str]:
    """Return the variables for a process that is to start the program.

    PYTHON_EXEC is the program, which torchrun also uses for its processes.
    """
    folder = _server()[1]
    return {"PYTHON_EXEC": str(folder / "python"), "WARM_PYTHON": str(folder / "socket")}


def forked() -> list[int]:
    """Return the processes that stand behind those of `python()`, and everything below them."""
    return descendants(_server()[0].pid)


@functools.cache
def _server() -> tuple[subprocess.Popen[bytes], Path]:
    """Start the server, which lives as long as this process; returns the folder of its socket."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    path = folder / "socket"
    # Use the real path: pyenv's python3 is a script, which takes ten times as long to start.
    words = (os.path.realpath(sys.executable), "-IS", str(HERE / "client.py"))
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
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
        server.communicate()  # closing its standard input ends it
        path.unlink()
        program.unlink()
        folder.rmdir()

    atexit.register(end)
    return server, folder
