"""The command that shows how far a job is: status."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sqshforge.cli import completion
from sqshforge.cli.options import Seconds
from sqshforge.errors import RequestError, WorkError

if TYPE_CHECKING:
    from sqshforge.status.run import Status

EVERY = 5.0  # seconds


@click.command()
@click.argument("what", required=False, metavar="[RUN|JOBID]", shell_complete=completion.folders)
@click.option(
    "--root",
    "given",
    type=click.Path(readable=False, path_type=Path),  # unreadable ones are skipped, not refused
    multiple=True,
    metavar="DIR",
    help="Where to look for runs [default: SQSHFORGE_RUNS, else checkpoints/ and the current "
    "folder].",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything that is known, as JSON.")
@click.option("--watch", "again", is_flag=True, help="Keep updating until the run ends.")
@click.option(
    "--every",
    type=Seconds(0.1),
    metavar="SECONDS",
    help="With --watch: the time between updates [default: 5].",
)
def status(
    what: str | None, given: tuple[Path, ...], as_json: bool, again: bool, every: float | None
) -> None:
    """Show the progress of RUN, a run's folder, or of job JOBID; by default all runs.

    It only reads the files in the run's folder.
    """
    from sqshforge.status import find
    from sqshforge.status.run import Clock, look

    if every is not None and not again:
        raise RequestError("--every has an effect only with --watch", fix="add --watch")
    if as_json and again:
        raise RequestError("--json prints once and --watch repeatedly", fix="leave one out")
    below = find.roots(given, os.environ)
    found = find.one(what, below) if what else None
    clocks: dict[int, Clock] = {}  # by file system (st_dev)

    def seen(folder: Path) -> Status | None:
        """Return a run's status; None if the run was removed after it was found."""
        try:
            device = folder.stat().st_dev
            if device not in clocks:
                clocks[device] = Clock.of(folder)
            return look(folder, clocks[device])
        except FileNotFoundError:
            return None

    def all_seen() -> Sequence[Status]:
        folders = [found.folder] if found else find.runs(below)
        if not folders:
            looked = ", ".join(str(root.absolute()) for root in below)
            raise RequestError(
                "there are no runs", where=looked, fix="--root DIR, or SQSHFORGE_RUNS=DIR:DIR"
            )
        there = [one for folder in folders if (one := seen(folder)) is not None]
        if not there:
            removed = ", ".join(map(str, folders))
            raise WorkError("the run was removed while it was looked at", where=removed)
        return there

    job = found.job if found else ""
    if again:
        from sqshforge.status.report import watch

        watch(all_seen, every or EVERY, job, several=found is None)
        return
    statuses = all_seen()
    if as_json:
        documents = [one.document() for one in statuses]
        click.echo(json.dumps(documents[0] if found else {"runs": documents}, indent=2))
        return
    from sqshforge.host.terminal import show_lines, show_table
    from sqshforge.status.report import LEAST, lines, table

    if found:
        show_lines(*lines(statuses[0], job))
        return
    from sqshforge.host import suggest

    newest = sorted(statuses, key=lambda one: one.facts.quiet)[0]
    show_table(table(statuses), LEAST)
    show_lines("", f"next: {suggest.sqshforge('status', newest.folder)}")


COMMANDS = (status,)
