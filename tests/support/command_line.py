"""The command line, as a user types it."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from sqshforge.host.programs import Programs, Result

SCRIPT = Path(sys.executable).with_name("sqshforge")


def sqshforge(*words: str | Path, env: Mapping[str, str] | None = None) -> Result:
    """Run `sqshforge WORDS`, with these variables in addition to those that are set."""
    return Programs().attempt([SCRIPT, *words], env=env)


def on_a_terminal(argv: Sequence[str | Path], env: Mapping[str, str]) -> str:
    """Return what a program writes to a terminal."""
    leader, follower = pty.openpty()
    try:
        with Programs().start(argv, stderr=follower, stdout=follower, env=env) as process:
            process.wait(timeout=300)
        os.close(follower)
        follower = -1
        seen = b""
        while True:
            try:
                piece = os.read(leader, 65536)
            except OSError:  # the other end is closed and everything is read
                break
            seen += piece
    finally:
        os.close(leader)
        if follower >= 0:
            os.close(follower)
    return seen.decode()


def parsed(command: click.Command, words: Sequence[str]) -> click.Context:
    """Parse a command's words without calling it; raises for words that it does not accept."""
    name, rest = "", list(words)
    while isinstance(command, click.Group):
        name = rest.pop(0)
        found = command.commands.get(name)
        if found is None:
            raise click.UsageError(f"no such command: {name}")
        command = found
    return command.make_context(name, rest)
