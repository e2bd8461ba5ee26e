"""The commands that a newcomer begins with: doctor, quickstart."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from sqshforge.commands.options import engine_option, steps_of


@click.command()
def doctor() -> NoReturn:
    """Tell what is there and what is missing, with the command that mends it."""
    from sqshforge import doctor as examination
    from sqshforge import project
    from sqshforge.programs import Programs

    findings = examination.examine(project.find().build, Programs())
    click.echo("\n".join(examination.lines(findings)))
    missing = [one for one in findings if one.needed and not one.ok]
    click.echo(f"\n{len(missing)} missing" if missing else "\nall there\nnext: make quickstart")
    sys.exit(3 if missing else 0)


@click.command()
@click.argument("target", default="cpu-mamba")
@click.option("--since", type=float, help="When set-up began, in seconds of the epoch.")
@engine_option
def quickstart(target: str, since: float | None, engine: str | None) -> NoReturn:
    """Build, pack and smoke-test a target; end with a table of the steps."""
    from sqshforge import quickstart as whole
    from sqshforge.terminal import show_table

    report = whole.go(steps_of(engine), target, since)
    show_table(report.table())
    click.echo(f"\nnext: {report.next_command}")
    sys.exit(0 if report.ok else 1)


COMMANDS = (doctor, quickstart)
