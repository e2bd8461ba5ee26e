"""The output of the commands' --help: complete, and within 80 columns."""

from __future__ import annotations

import click
import pytest

from sqshforge.cli.main import cli
from sqshforge.cli.squash import cache
from tests.support.command_line import sqshforge

pytestmark = pytest.mark.processes

EIGHTY = {"COLUMNS": "80"}


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("group", [cli, cache], ids=["sqshforge", "cache"])
def test_no_summary_of_a_command_is_cut(group: object) -> None:
    listed = cli.commands if group is cli else cache.commands
    done = sqshforge(*(() if group is cli else ("cache",)), "--help", env=EIGHTY)
    assert done.code == 0, done.err
    said = done.out.partition("Commands:")[2]
    assert "..." not in said
    for name, command in listed.items():
        assert command.help is not None
        summary, _, _ = command.help.partition("\n\n")
        assert f"{name} {words(summary)}" in words(said)


@pytest.mark.parametrize(
    "command",
    [(), *((name,) for name in cli.commands), *(("cache", one) for one in cache.commands)],
)
def test_no_line_of_help_is_wider_than_the_terminal_or_cut(command: tuple[str, ...]) -> None:
    done = sqshforge(*command, "--help", env=EIGHTY)
    assert done.code == 0, done.err
    usage, _, rest = done.out.partition("\n")
    assert usage.startswith(f"Usage: {' '.join(('sqshforge', *command))}")
    assert "..." not in rest
    assert [line for line in done.out.splitlines() if len(line) > 80] == []


def test_every_option_says_what_it_does() -> None:
    for command in (*cli.commands.values(), *cache.commands.values()):
        for option in command.params:
            if isinstance(option, click.Option):
                text, _, _ = (option.help or "").partition("[")
                assert text, f"{command.name} {option.opts[-1]}"
