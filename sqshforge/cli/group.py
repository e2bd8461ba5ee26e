"""A group of commands that suggests the nearest to an unknown one and shows whole summaries."""

from __future__ import annotations

import difflib

import click

from sqshforge.errors import RequestError


class Commands(click.Group):
    """A group whose help shows each command's whole summary, on several lines if needed."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command; its summary is the first paragraph of its help.

        click would cut that to one line, with dots at the end.
        """
        if cmd.short_help is None and cmd.help:
            cmd.short_help = " ".join(cmd.help.split("\n\n")[0].split())
        super().add_command(cmd, name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command by name; `RequestError` for an unknown one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            raise RequestError(
                f"unknown command {args[0]!r}",
                fix=f"did you mean {near[0]}?"
                if near
                else f"{ctx.command_path} --help lists all commands",
            ) from None
