"""The one runner of programs: output, failures and missing programs, with real programs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sqshforge.errors import MissingError, WorkError
from sqshforge.host.programs import Programs
from sqshforge.host.suggest import sudo
from tests.support.containers import until

pytestmark = pytest.mark.processes


def test_capture_returns_output_and_takes_input_and_variables() -> None:
    out = Programs().capture(["sh", "-c", "cat; echo $X"], stdin=b"in\n", env={"X": "set"})
    assert out == "in\nset\n"


def test_a_failure_tells_the_command_its_code_and_its_last_words() -> None:
    with pytest.raises(WorkError) as caught:
        Programs().capture(["sh", "-c", "echo reason >&2; exit 7"])
    assert "sh failed with exit code 7" in caught.value.what
    assert "reason" in caught.value.what
    assert "exit 7" in caught.value.where


def test_a_killed_program_is_reported_by_its_signal() -> None:
    with pytest.raises(WorkError, match="signal SIGKILL"):
        Programs().capture(["sh", "-c", "kill -9 $$"])
    with pytest.raises(WorkError, match=r"signal 36:?$"):  # a real-time signal, which has no name
        Programs().capture(["sh", "-c", "kill -36 $$"])


def test_a_missing_program_names_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError) as caught:
        Programs().require("mksquashfs", "packing")
    assert caught.value.fix == f"{sudo()}apt-get install squashfs-tools"
    with pytest.raises(MissingError, match="mksquashfs cannot be started"):
        Programs().attempt(["mksquashfs"])


def test_follow_hands_lines_on_as_they_come() -> None:
    seen: list[tuple[str, float]] = []
    started = time.monotonic()
    Programs().follow(
        ["sh", "-c", "echo one; sleep 0.5; printf '10%%\\r20%%\\n'"],
        lambda line: seen.append((line, time.monotonic() - started)),
    )
    assert [line for line, _ in seen] == ["one", "10%", "20%"]
    assert seen[1][1] - seen[0][1] > 0.3


def test_a_program_never_outlives_its_block() -> None:
    with (
        pytest.raises(ZeroDivisionError),
        Programs().start(["sleep", "60"], stdout=subprocess.DEVNULL) as process,
    ):
        raise ZeroDivisionError
    assert process.returncode is not None


INTERRUPTED = """
import signal, sys
from sqshforge.host.programs import Programs

def interrupt(frame, event, called):
    if event == "c_return" and called.__name__ == "acquire" and frame.f_code.co_name == "_wait":
        signal.raise_signal(signal.SIGINT)

with Programs().start(["sleep", "600"]) as process:
    sys.setprofile(interrupt)
    process.wait(timeout=60)
"""


def test_an_interrupt_at_the_worst_moment_is_no_hindrance_to_the_end() -> None:
    """The worst moment is between taking Popen's own lock and the block that releases it."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGINT and b"KeyboardInterrupt" in done.stderr


def test_a_timeout_is_an_answer() -> None:
    assert Programs().attempt(["sleep", "9"], timeout=0.2).code == 124


def test_all_finds_every_program_of_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tool").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}/b:{tmp_path}/none:{tmp_path}/a")
    assert Programs().all("tool") == [tmp_path / "b" / "tool", tmp_path / "a" / "tool"]


def test_a_program_ends_when_its_caller_is_killed(tmp_path: Path) -> None:
    mark, ready = tmp_path / "asked to end", tmp_path / "ready"
    script = f"trap 'touch \"{mark}\"; exit' TERM; touch {ready}; while true; do sleep 0.05; done"
    code = (
        "from sqshforge.host.programs import Programs\n"
        f"with Programs().start(['sh', '-c', {script!r}]) as process:\n"
        "    process.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as caller:
        assert until(ready.exists)
        caller.kill()
    assert until(mark.exists)
