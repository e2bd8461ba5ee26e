"""The commands to begin with: doctor, quickstart."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from sqshforge.cli import completion
from sqshforge.cli.options import Seconds, engine_option, steps_of
from sqshforge.errors import RequestError


@click.command()
@click.option("--cluster", is_flag=True, help="Check the nodes of a Slurm cluster instead.")
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Check N nodes, waiting if fewer are idle [default: all idle nodes].",
)
@click.option(
    "--partition", metavar="P", help="The partition of the nodes [default: Slurm's default]."
)
@click.option(
    "--folder",
    "folders",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="DIR",
    help="A folder that all nodes must see [default: the current folder].",
)
@click.option(
    "--image",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="An image that all nodes must be able to read [default: the newest in build/].",
)
@click.option(
    "--timeout",
    "seconds",
    type=Seconds(5),
    metavar="SECONDS",
    help="The time within which all nodes must answer [default: 120].",
)
def doctor(cluster: bool, **asked: Any) -> NoReturn:
    """Show what is installed and what is missing, with commands that fix it.

    With --cluster it starts one job with one task on each idle node of a partition; inside a job
    it checks that job's nodes. It needs Python on the nodes but no root, and changes nothing.
    Slurm's variables, such as SLURM_ACCOUNT, take effect.
    """
    from sqshforge import doctor as examination
    from sqshforge import project

    given = {name: value for name, value in asked.items() if value not in (None, ())}
    if cluster:
        from sqshforge.cli.workflow import launcher_of
        from sqshforge.doctor import cluster as nodes
        from sqshforge.host.programs import Programs
        from sqshforge.host.terminal import Reporter

        asked_for = nodes.Request(**given, launcher=launcher_of)
        sys.exit(nodes.main(project.find(), asked_for, Programs(), Reporter()))
    if given:
        option = {"folders": "folder", "seconds": "timeout"}.get(name := next(iter(given)), name)
        raise RequestError(f"--{option} has an effect only with --cluster", fix="add --cluster")
    sys.exit(examination.main(project.find()))


@click.command()
@click.argument("target", default="cpu-mamba", shell_complete=completion.targets)
@click.option(
    "--since",
    metavar="SECONDS",
    type=Seconds(0, most=None),
    help="When set-up began, in seconds since the epoch, to add its time as a row.",
)
@engine_option
def quickstart(target: str, since: float | None, engine: str | None) -> NoReturn:
    """Build, pack and smoke-test a target, and show a table of the steps."""
    from sqshforge import doctor as examination
    from sqshforge.cli import workflow as whole
    from sqshforge.host.terminal import show_lines, show_table

    steps = steps_of(engine)
    host = examination.Host(
        project=steps.project, programs=steps.programs, engine=steps.engine_name or ""
    )
    examination.require(host, steps.sqsh(target))
    report = whole.quickstart(steps, target, since)
    show_table(report.table())
    show_lines("", f"next: {report.next_command}")
    sys.exit(0 if report.ok else 1)


COMMANDS = (doctor, quickstart)
