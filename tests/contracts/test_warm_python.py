"""The tests' python with torch already loaded does what python does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes, warm
from tests.training.support.runs import ROOT, wait_for

pytestmark = pytest.mark.processes


def start(
    folder: Path, code: str, *words: str, before: Sequence[str] = (), **more: str
) -> subprocess.Popen[str]:
    variables = warm.python()
    (folder / "program.py").write_text(code)
    pipe: Any = subprocess.PIPE
    return subprocess.Popen(
        [*before, variables["PYTHON_EXEC"], str(folder / "program.py"), *words],
        env={**os.environ, **variables, **more},
        cwd=folder,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


def test_words_variables_folder_and_files_are_its_own(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "assert 'torch' in sys.modules and 'training' not in sys.modules\n"
        "print(sys.argv[1:], os.environ['OWN'], os.getcwd(), __name__, sys.stdin.read())\n"
        "print('shown', file=sys.stderr)\n"
        "sys.exit(7)\n"
    )
    process = start(tmp_path, code, "a", "b c", OWN="mine")
    out, err = process.communicate("asked", timeout=300)
    assert out == f"['a', 'b c'] mine {tmp_path} __main__ asked\n"
    assert (err, process.returncode) == ("shown\n", 7)


def test_a_sitecustomize_is_read(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("import os; os.environ['SEEN'] = 'yes'")
    process = start(tmp_path, "import os; print(os.environ['SEEN'])", PYTHONPATH=f"{tmp_path}/site")
    assert process.communicate(timeout=300)[0] == "yes\n"


def test_another_copy_of_training_is_loaded_as_it_is(tmp_path: Path) -> None:
    code = "import sys; assert 'training' not in sys.modules; from training import job; print(job)"
    (tmp_path / "training/job").mkdir(parents=True)
    (tmp_path / "training/__init__.py").touch()
    (tmp_path / "training/job/__init__.py").touch()
    out, err = start(tmp_path, code, PYTHONPATH=str(ROOT)).communicate(timeout=300)
    assert f"{tmp_path}/training/job/__init__.py" in out, err


@pytest.mark.root
def test_it_is_in_the_namespaces_of_who_asks(tmp_path: Path) -> None:
    code = "import os, socket; print(socket.gethostname(), os.path.ismount('mounted'))"
    script = 'hostname other; mount -t tmpfs none mounted; exec "$0" "$@"'
    (tmp_path / "mounted").mkdir()
    apart = ("unshare", "--uts", "--mount", "sh", "-c", script)
    out, err = start(tmp_path, code, before=apart).communicate(timeout=300)
    assert out == "other True\n", err


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("", 0),
        ("raise ValueError('shown')", 1),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_it_ends_as_the_program_does(tmp_path: Path, code: str, ending: int) -> None:
    process = start(tmp_path, code)
    _, err = process.communicate(timeout=300)
    assert process.returncode == ending
    assert ("ValueError: shown" in err) == (ending == 1)


LEAVES = """
import atexit, sys, threading, time
atexit.register(print, "done")
threading.Thread(target=lambda: (time.sleep(0.5), print("waited for", flush=True))).start()
sys.exit({code!r})
"""


@pytest.mark.parametrize(
    ("code", "ending", "said"), [(None, 0, ""), (300, 44, ""), ("why", 1, "why\n")]
)
def test_what_is_left_for_the_end_is_done(
    tmp_path: Path, code: object, ending: int, said: str
) -> None:
    process = start(tmp_path, LEAVES.format(code=code))
    assert process.communicate(timeout=300) == ("waited for\ndone\n", said)
    assert process.returncode == ending


WAITS = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
Path("pid").write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_program(tmp_path: Path, how: signal.Signals) -> None:
    """A signal that kills the process standing in for the program ends the program too."""
    process = start(tmp_path, WAITS)
    shown = tmp_path / "pid"
    assert wait_for(lambda: shown.exists() and shown.read_text(), process)
    program = int(shown.read_text())
    assert program in warm.forked() and program in processes.descendants(process.pid)
    assert processes.program(process.pid) == processes.program(program) == program
    process.send_signal(how)
    process.communicate(timeout=300)
    assert process.returncode == (85 if how == signal.SIGTERM else -how)
    deadline = time.monotonic() + 120
    while processes.parent(int(shown.read_text())):
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "text", [b"", b'{"words": '], ids=["nothing is said", "in the middle of the text"]
)
def test_a_client_that_goes_too_soon_ends_no_other(tmp_path: Path, text: bytes) -> None:
    other = start(tmp_path, WAITS)
    shown = tmp_path / "pid"
    try:
        assert wait_for(lambda: shown.exists() and shown.read_text(), other)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(warm.python()["WARM_PYTHON"])
            if text:
                socket.send_fds(client, [(1000).to_bytes(8, "little")], [0, 1, 2])
                client.sendall(text)
        out, _ = start(tmp_path, "print('served')").communicate(timeout=60)
        assert out == "served\n"
        assert other.poll() is None
        assert processes.parent(int(shown.read_text()))
    finally:
        other.kill()
        other.communicate()
