"""Weights & Biases requested only by the environment: it is used, or left out with a message."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.support.runs import ROOT
from training.loggers import open_wandb_of_environment
from training.loggers.base import Logger
from training.loggers.console import Console

NAMES = (
    *("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"),
    *("WANDB_INIT_TIMEOUT", "WANDB_FINISH_TIMEOUT"),
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of whoever runs the tests."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def opened(folder: Path) -> list[Logger]:
    return open_wandb_of_environment(folder, {"a": 1}, Console(), project="p", name="tiny")


def hide(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name == "training.loggers.wandb" or name.partition(".")[0] == module:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [None, "disabled"])
def test_without_a_wish_there_is_none_and_nothing_is_said(
    tmp_path: Path,
    mode: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hide("wandb", monkeypatch)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    assert opened(tmp_path) == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("variable", "value"), [("WANDB_API_KEY", "a" * 40), ("WANDB_MODE", "online")]
)
def test_a_library_that_is_missing_is_a_warning(
    tmp_path: Path,
    variable: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hide("wandb", monkeypatch)
    monkeypatch.setenv(variable, value)
    assert opened(tmp_path) == []
    shown = capsys.readouterr().err
    assert shown.startswith("WARNING: Weights & Biases is left out, though WANDB_API_KEY or")
    assert "wandb cannot be imported here" in shown and "fix: pip install wandb" in shown
    assert shown.count("\n") == 1


PROGRAM = """
import sys
from pathlib import Path
from training.errors import RequestError
from training.loggers import open_wandb_of_environment
from training.loggers.console import Console
from training.loggers.wandb import begin

folder = Path(sys.argv[1])
for logger in open_wandb_of_environment(folder, {"a": 1}, Console(), project="p", name="tiny"):
    logger.close(failed=False)
if sys.argv[2:]:
    try:
        begin(folder, {}, project="p")
    except RequestError as error:
        print(f"refused: {error}")
print("trained")
"""


def trained(
    folder: Path, *asked: str, program: str = PROGRAM, **given: str
) -> subprocess.CompletedProcess[str]:
    """Run with the real library, which reads the environment once per process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **given}
    return subprocess.run(
        [sys.executable, "-c", program, str(folder), *asked],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"WANDB_API_KEY": "no key"}, "WANDB_API_KEY invalid"),
        ({"WANDB_MODE": "sometimes"}, "Input should be"),
    ],
)
def test_what_is_refused_is_a_warning_and_an_error_where_use_wandb_asked(
    tmp_path: Path, given: dict[str, str], shown: str
) -> None:
    pytest.importorskip("wandb")
    done = trained(tmp_path, "use_wandb", **given)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert shown in line and "WANDB_MODE=disabled" in line
    refused, end = done.stdout.splitlines()
    assert refused.startswith("refused: use_wandb: ") and end == "trained"
    assert "fix: set WANDB_MODE=offline, which keeps the run here" in refused


@pytest.mark.processes
def test_a_server_that_does_not_answer_is_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        server = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = trained(
            tmp_path,
            WANDB_API_KEY="a" * 40,
            WANDB_BASE_URL=server,
            WANDB_INIT_TIMEOUT="3",
        )
    assert done.returncode == 0 and "trained" in done.stdout, done.stderr
    shown = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert len(shown) == 1 and "is left out" in shown[0], done.stderr


@pytest.mark.processes
def test_what_is_asked_for_and_there_is_used(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    done = trained(tmp_path, WANDB_MODE="offline")
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    known = json.loads((tmp_path / "wandb.json").read_text())
    assert list((tmp_path / "wandb").glob(f"offline-run-*-{known['id']}"))


LIMIT = """
import sys
from pathlib import Path
from training.loggers.wandb import begin

logger = begin(Path(sys.argv[1]), {}, project="p")
print(logger._run.settings.finish_timeout)
logger.close(failed=False)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("given", "limit"), [({}, "600.0"), ({"WANDB_FINISH_TIMEOUT": "7"}, "7.0")]
)
def test_the_end_waits_for_a_silent_server_for_a_limited_time(
    tmp_path: Path, given: dict[str, str], limit: str
) -> None:
    done = trained(tmp_path, program=LIMIT, WANDB_MODE="offline", **given)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == limit
