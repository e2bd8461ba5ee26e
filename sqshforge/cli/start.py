"""The commands that a newcomer begins with: doctor, quickstart."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from sqshforge.cli import completion
from sqshforge.cli.options import engine_option, steps_of


@click.command()
def doctor() -> NoReturn:
    """Tell what is there and what is missing, with the command that mends it."""
    from sqshforge import doctor as examination
    from sqshforge import project

    sys.exit(examination.main(project.find()))


@click.command()
@click.argument("target", default="cpu-mamba", shell_complete=completion.targets)
@click.option("--since", type=float, help="When set-up began, in seconds of the epoch.")
@engine_option
def quickstart(target: str, since: float | None, engine: str | None) -> NoReturn:
    """Build, pack and smoke-test a target; end with a table of the steps."""
    from sqshforge import doctor as examination
    from sqshforge.cli import workflow as whole
    from sqshforge.host.terminal import show_lines, show_table

    steps = steps_of(engine)
    host = examination.Host(
        project=steps.project, programs=steps.programs, engine=steps.engine_name or ""
    )
    examination.require(host, steps.project.sqsh(target))
    report = whole.quickstart(steps, target, since)
    show_table(report.table())
    show_lines("", f"next: {report.next_command}")
    sys.exit(0 if report.ok else 1)


COMMANDS = (doctor, quickstart)
