"""What the entry points share: how a failure is reported, and the exit code for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.support.runs import ROOT
from training.entrypoint import exit_code

SAID = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[10.0.0.6]:31337. This is typically caused by a remote worker hanging."
)


def fail(said: str) -> int:
    raise RuntimeError(said)


def test_a_rank_that_lost_another_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cause is reported by the rank that failed."""
    monkeypatch.setenv("RANK", "3")
    assert exit_code(lambda: fail(SAID)) == 1
    assert capsys.readouterr().err == (
        "rank 3: another rank is gone: Connection closed by peer [10.0.0.6]:31337.\n"
    )


def test_it_names_the_peer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    exit_code(
        lambda: fail("[pair.cc:547] Read error [10.0.0.5]:61098: Connection reset by peer. Check")
    )
    said = "rank 1: another rank is gone: Read error [10.0.0.5]:61098: Connection reset by peer\n"
    assert capsys.readouterr().err == said


def test_any_other_error_has_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(RuntimeError, match="out of memory"):
        exit_code(lambda: fail("CUDA out of memory"))
    monkeypatch.delenv("RANK")
    with pytest.raises(RuntimeError, match="closed by peer"):
        exit_code(lambda: fail(SAID))


@pytest.mark.processes
def test_a_character_that_standard_output_lacks_is_escaped(tmp_path: Path) -> None:
    code = "from training import cli; cli.outlive(); print('saved donn\\xe9es')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"saved donn\\xe9es\n"), done.stderr
