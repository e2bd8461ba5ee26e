"""docs/reference/cli.md: every command of sqshforge, as in its --help."""

from __future__ import annotations

from collections.abc import Iterator

import click

from reference.markdown import code, page, prose, table
from sqshforge.cli.main import cli


def text() -> str:
    root = click.Context(cli, info_name="sqshforge")
    commands = list(_commands(cli, root))
    names = [[f"[`{path}`](#{_anchor(path)})", _summary(one)] for path, one, _ in commands]
    return page(
        "The commands of sqshforge",
        "sqshforge/cli/",
        "`sqshforge COMMAND --help` prints the same. [exit-codes.md](exit-codes.md) has what they "
        "end with.",
        table(["command", "what it does"], names),
        *(block for entry in commands for block in _section(*entry)),
    )


def _commands(
    group: click.Group, context: click.Context
) -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yield the commands of a group and of its subgroups, each with its path and context."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if command.hidden:
            continue
        own = click.Context(command, info_name=name, parent=context)
        if isinstance(command, click.Group):
            yield from _commands(command, own)
        else:
            yield own.command_path.removeprefix("sqshforge "), command, own


def _anchor(path: str) -> str:
    return path.replace(" ", "-")


def _summary(command: click.Command) -> str:
    return prose((command.help or "").replace("\b", "").split("\n\n")[0])


def _section(path: str, command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield a command's heading, its usage, what it does, and its options."""
    usage = command.collect_usage_pieces(context)
    yield f"## {path}"
    yield "\n".join(["```", " ".join([context.command_path, *usage]), "```"])
    for paragraph in (command.help or "").split("\n\n"):
        if paragraph.startswith("\b\n"):  # click keeps such a paragraph as it stands
            yield "\n".join(["```", paragraph.removeprefix("\b\n").rstrip(), "```"])
        else:
            yield prose(paragraph)
    options = [one for one in command.get_params(context) if isinstance(one, click.Option)]
    records = [one.get_help_record(context) for one in options if "--help" not in one.opts]
    rows = [[code(" ".join(one[0].split())), prose(one[1])] for one in records if one]
    if rows:
        yield table(["option", "meaning"], rows)
