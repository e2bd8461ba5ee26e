"""Progress: a live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from sqshforge.errors import RequestError
from sqshforge.host import terminal
from tests.support import run_folders
from tests.support.command_line import SCRIPT, on_a_terminal


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (999, "999 B"), (1.5e3, "1.5 kB"), (4.29e8, "429.0 MB")]
)
def test_bytes_for_people(count: float, shown: str) -> None:
    assert terminal.human(count) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(0.04, "0.0 s"), (61, "1 min 01 s")])
def test_times_for_people(seconds: float, shown: str) -> None:
    assert terminal.duration(seconds) == shown


def test_without_a_terminal_it_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    reporter = terminal.Reporter(out)
    with reporter.track("pack", total=100e6) as tracker:
        for second in range(1, 26):
            now[0] = float(second)
            tracker.advance(1e6)
    assert out.getvalue().splitlines() == [
        "pack ...",
        "pack: 10.0 s, 10%, 10.0 MB, 1.0 MB/s, 1 min 30 s left",
        "pack: 20.0 s, 20%, 20.0 MB, 1.0 MB/s, 1 min 20 s left",
    ]


def test_quiet_says_nothing() -> None:
    out = io.StringIO()
    reporter = terminal.Reporter(out, quiet=True)
    reporter.say("hello")
    with reporter.track("work") as tracker:
        tracker.note("x")
    assert out.getvalue() == ""


SHOW = """
import time
from sqshforge.host.terminal import Reporter
with Reporter().track("pack", total=4e6) as tracker:
    for _ in range(4):
        time.sleep(0.2)
        tracker.advance(1e6)
"""


@pytest.mark.processes
def test_on_a_real_terminal_it_is_one_live_line_with_rate_and_time_left() -> None:
    env = {"TERM": "xterm", "COLUMNS": "120", "NO_COLOR": ""}
    text = on_a_terminal([sys.executable, "-c", SHOW], env)
    assert "pack" in text
    assert "MB/s" in text
    assert "left" in text
    assert "pack ..." not in text
    assert "\x1b" in text


@pytest.mark.processes
@pytest.mark.parametrize(
    "env", [{"TERM": "dumb", "NO_COLOR": ""}, {"TERM": "xterm", "NO_COLOR": "1"}]
)
def test_a_plain_terminal_gets_plain_lines(env: Mapping[str, str], tmp_path: Path) -> None:
    """Covers work in progress, a table, and a watched run."""
    (tmp_path / "tree/etc").mkdir(parents=True)
    (tmp_path / "tree/etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    file = tmp_path / "tree.sqsh"
    run = run_folders.write(tmp_path / "run", run_folders.history(5))
    run_folders.noted(run, 0)
    packed = on_a_terminal([SCRIPT, "pack", f"rootfs:{tmp_path / 'tree'}", "-o", file], env)
    verified = on_a_terminal([SCRIPT, "verify", file], env)
    watched = on_a_terminal([SCRIPT, "status", run, "--watch"], env)
    assert re.search(r"^pack\S* .*\.\.\.\r$", packed, re.MULTILINE), packed
    assert "verified" in verified
    assert "done" in watched
    for said in (packed, verified, watched):
        assert [sign for sign in said if sign < " " and sign not in "\r\n"] == []
        assert re.search(r"\r(?!\n)", said) is None


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1000", 1000),
        ("2K", 2048),
        ("1.5M", 3 << 19),
        ("50G", 50 << 30),
        ("1 TiB", 1 << 40),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert terminal.size(text, "--limit") == count


@pytest.mark.parametrize("text", ["", "-1", "many", "1X", "G"])
def test_what_is_no_size_is_a_wrong_request(text: str) -> None:
    with pytest.raises(RequestError, match="is not a size"):
        terminal.size(text, "--limit")
