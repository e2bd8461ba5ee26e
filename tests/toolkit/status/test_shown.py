"""What `sqshforge status` shows on terminals of any width, and in logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import SCRIPT, on_a_terminal, sqshforge
from tests.support.run_folders import history, noted, write

pytestmark = pytest.mark.processes

TERMINAL = {"TERM": "xterm", "NO_COLOR": "", "COLUMNS": "160", "LINES": "50"}
# Of folders: what rich reads as markup, what it reads as the end of none, a terminal's title.
ODD = ("run[lr=1e-3]", "a[/b]", "title\x1b]0;owned\x07")


@pytest.mark.parametrize("words", [[], ["--watch"]])
def test_names_of_folders_are_no_markup_and_nothing_that_a_terminal_obeys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    for name in ODD:
        noted(write(tmp_path / name, history(5)), 0)
    monkeypatch.chdir(tmp_path)
    text = on_a_terminal([SCRIPT, "status", *words, "--root", "."], TERMINAL)
    assert "run[lr=1e-3]" in text and "a[/b]" in text and r"title\x1b]0;owned\x07" in text, text
    assert "\x1b]0;" not in text and "\x07" not in text


@pytest.mark.parametrize("name", ODD)
def test_one_run_of_any_name_is_watched(tmp_path: Path, name: str) -> None:
    run = write(tmp_path / name, history(5))
    noted(run, 0)
    printed = name.replace("\x1b", r"\x1b").replace("\x07", r"\x07")
    for text in (
        on_a_terminal([SCRIPT, "status", run, "--watch"], {**TERMINAL, "COLUMNS": "400"}),
        sqshforge("status", run, "--watch").out,
    ):
        assert f"{tmp_path}/{printed}" in text, text
        assert "\x1b]0;" not in text and "\x07" not in text


@pytest.mark.parametrize("words", [[], ["--watch"]])
def test_logs_get_whole_lines_also_where_colors_are_forced(
    tmp_path: Path, words: list[str]
) -> None:
    """As CI has it: FORCE_COLOR makes no terminal of a pipe."""
    run = write(tmp_path / ("a-long-name-" * 10), history(5))
    noted(run, 0)
    env = {**TERMINAL, "COLUMNS": "80", "FORCE_COLOR": "1"}
    for what in (["--root", tmp_path], [run]):
        done = sqshforge("status", *words, *what, env=env)
        assert done.code == 0, done.err
        assert str(run) in done.out and "\x1b" not in done.out, done.out
