"""What `sqshforge status` shows on terminals of any width, and in logs."""

from __future__ import annotations

import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from sqshforge.cli.main import cli
from sqshforge.host import suggest
from tests.support.command_line import SCRIPT, on_a_terminal, sqshforge
from tests.support.run_folders import history, noted, report, step, write

pytestmark = pytest.mark.processes

TERMINAL = {"TERM": "xterm", "NO_COLOR": "", "COLUMNS": "160", "LINES": "50"}
# Names of folders: rich markup, the end of markup that never began, a terminal's title.
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
    """CI sets FORCE_COLOR, which does not make a pipe a terminal."""
    run = write(tmp_path / ("a-long-name-" * 10), history(5))
    noted(run, 0)
    env = {**TERMINAL, "COLUMNS": "80", "FORCE_COLOR": "1"}
    for what in (["--root", tmp_path], [run]):
        done = sqshforge("status", *words, *what, env=env)
        assert done.code == 0, done.err
        assert str(run) in done.out and "\x1b" not in done.out, done.out


TITLES = ["run", "state", "job", "step", "of", "loss", "left"]


@pytest.mark.parametrize(
    ("columns", "titles"),
    [
        (50, ["run", "state", "step", "left"]),
        (80, TITLES),
        (100, [*TITLES[:-1], "tokens/s", "left", "last line"]),
        (160, [*TITLES[:-1], "tokens/s", "left", "last line", "checkpoint"]),
    ],
)
@pytest.mark.parametrize("words", [[], ["--watch"]])
def test_runs_have_their_names_on_terminals_of_any_width(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    columns: int,
    titles: list[str],
) -> None:
    """Less important columns make room for names, and no number is cut."""
    names = [f"d5/mamba_2.8b_lr3e-4_seed{seed}" for seed in (1, 2, 3)]
    for name in names:
        lines = [step(123_456, 2.5), report(123_456)]
        noted(write(tmp_path / name, lines, num_steps=250_000), 0, job="4242117")
    monkeypatch.chdir(tmp_path)
    env = {**TERMINAL, "COLUMNS": str(columns)}
    text = on_a_terminal([SCRIPT, "status", *words, "--root", "."], env)
    head, *rows = [line for line in plain(text) if line.strip()][:4]
    assert head.split() == " ".join(titles).split()
    assert sorted(row.split()[0] for row in rows) == names
    assert len(head) <= columns
    for row in rows:
        assert row.split()[1] == "done" and "123,456" in row.split()
        assert ("250,000" in row.split()) == ("of" in titles)
        assert "…" not in row and len(row) <= columns


def test_a_name_wider_than_the_terminal_goes_on_in_the_next_line(tmp_path: Path) -> None:
    run = write(tmp_path / ("a-long-name-" * 10), history(5))
    text = on_a_terminal([SCRIPT, "status", "--root", run], {**TERMINAL, "COLUMNS": "80"})
    head, *rows = plain(text)
    rows = rows[: rows.index("")]
    assert head.split() == ["run", "state", "step"]
    assert "".join(row.split()[0] for row in rows) == str(run)
    assert rows[0].split()[1:] == ["running", "5"]


@pytest.mark.parametrize("has_library", [True, False])
def test_after_a_run_that_is_done_its_curves_are_proposed_where_they_can_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_library: bool
) -> None:
    """`make quickstart` does not install matplotlib, with which training.report draws."""
    run = write(tmp_path / "run", history(5))
    noted(run, 0)
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("m") if has_library else None)
    if has_library:
        sys.modules["matplotlib"].__spec__ = ModuleSpec("matplotlib", None)
    following = CliRunner().invoke(cli, ["status", str(run)]).output.splitlines()[-1]
    proposed = suggest.python("-m", "training.report", run, "-o", "report")
    other = suggest.sqshforge("status", run, "--json")
    assert following == f"next: {proposed if has_library else other}"


def plain(text: str) -> list[str]:
    """Return the lines sent to a terminal, without cursor movements and colors."""
    return [line.rstrip() for line in re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", text).splitlines()]
