"""The quickstart: every step of a target in order, then what each took."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.table import Table

from sqshforge.cli import next_command as next_job
from sqshforge.cli.workflow import Steps
from sqshforge.host import suggest
from sqshforge.host.terminal import duration, human
from sqshforge.run.smoke_test import Outcome
from sqshforge.squash import pack
from sqshforge.squash.cache import Cache

DONE_BEFORE = "already done"


@dataclass(frozen=True)
class Row:
    """One step of the quickstart."""

    step: str
    what: str
    took: str
    size: str = ""


@dataclass(frozen=True)
class Report:
    """What was done, and what to do next."""

    rows: tuple[Row, ...]
    outcome: Outcome
    next_command: str

    @property
    def ok(self) -> bool:
        return self.outcome.ok

    def table(self) -> Table:
        shown = Table("step", "what", "took", "size", box=None, pad_edge=False)
        for row in self.rows:
            shown.add_row(row.step, row.what, row.took, row.size)
        return shown


def go(steps: Steps, target: str, since: float | None) -> Report:
    """Take a target from recipe to proven sqsh.

    `since` is when the set-up of the machine began, for the table. Raises what the steps raise.
    """
    rows = []
    if since is not None:
        rows.append(Row("set up", "packages and .venv", duration(time.time() - since)))
    built = steps.build(target)
    rows.append(
        Row("image", built.source, _took(built.seconds, built.up_to_date), human(built.image.size))
    )
    packed = steps.pack(
        built, steps.project.sqsh(target), pack.Options.of("shared"), Cache.of_user()
    )
    rows.append(
        Row("sqsh", str(packed.path), _took(packed.seconds, packed.up_to_date), human(packed.size))
    )
    outcome = steps.prove(packed)
    verdict = "passed" if outcome.ok else "FAILED"
    rows.append(
        Row(
            "smoke test",
            f"{verdict}: {sum(c.ok for c in outcome.checks)} of {len(outcome.checks)} checks",
            _took(outcome.seconds, outcome.remembered),
        )
    )
    rows += [
        Row(f"  {check.name}", check.detail, duration(check.seconds)) for check in outcome.checks
    ]
    return Report(
        rows=tuple(rows),
        outcome=outcome,
        next_command=next_job.launch(packed.path, steps.programs)
        if outcome.ok
        else suggest.sqshforge("run", packed.path, "--", "bash"),
    )


def _took(seconds: float, done_before: bool) -> str:
    return DONE_BEFORE if done_before else duration(seconds)
