"""The command line, as a user types it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from sqshforge.host.programs import Programs, Result

SCRIPT = Path(sys.executable).with_name("sqshforge")


def sqshforge(*words: str | Path, env: Mapping[str, str] | None = None) -> Result:
    """Run `sqshforge WORDS`, with these variables besides the ones that are set."""
    return Programs().attempt([SCRIPT, *words], env=env)


def parsed(command: click.Command, words: Sequence[str]) -> click.Context:
    """What a command makes of its words, without a call; raises for one that it does not take."""
    name, rest = "", list(words)
    while isinstance(command, click.Group):
        name = rest.pop(0)
        found = command.commands.get(name)
        if found is None:
            raise click.UsageError(f"no such command: {name}")
        command = found
    return command.make_context(name, rest)
