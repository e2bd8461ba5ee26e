"""The steps from a recipe to a smoke-tested sqsh; each is a no-op if nothing changed."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from sqshforge import engine, lock, recipe
from sqshforge.build import build as building
from sqshforge.build import bundle as vendor
from sqshforge.build import inputs
from sqshforge.errors import SqshforgeError
from sqshforge.host import suggest
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter, duration, human
from sqshforge.hot import NONE, HotList
from sqshforge.project import Project, find
from sqshforge.run import smoke_test
from sqshforge.run.smoke_test import Outcome
from sqshforge.squash import pack as squash
from sqshforge.squash import request
from sqshforge.squash.cache import Cache

DONE_BEFORE = "already done"
TARGET = "io.sqshforge.target"  # a label of every image built here


@dataclass(frozen=True)
class Steps:
    """The steps of one checkout, with the engine that was asked for (None: choose one)."""

    project: Project
    engine_name: str | None
    programs: Programs
    reporter: Reporter
    parameters: Mapping[str, str] = field(default_factory=dict)
    platform: str | None = None  # None: this machine's own, else the recipe's first

    def name(self, target: str) -> str:
        """Return a target's name with its platform's suffix, after which its files are named."""
        return recipe.find(target, self.project.recipes, platform=self.platform).name

    def sqsh(self, target: str) -> Path:
        """Return the path of a target's squash file."""
        return self.project.sqsh(self.name(target))

    def wanted(self, target: str) -> tuple[recipe.Recipe, lock.Lock]:
        """Return a target's recipe and lock, for this platform and these parameters."""
        return wanted(target, self.project.recipes, self.parameters, self.platform)

    def build(self, target: str) -> building.Built:
        """Build a target's image with the engine that was asked for, else with an available one."""
        what, locked = self.wanted(target)
        chosen = engine.choose(self.engine_name, self.programs)
        return building.build(what, locked, chosen, self.project.root, self.programs, self.reporter)

    def vendor(self, target: str) -> tuple[Path, inputs.Bundle]:
        """Gather the bundle from which a target can be built without a network."""
        what, locked = self.wanted(target)
        chosen = engine.choose(self.engine_name, self.programs)
        return vendor.gather(what, locked, chosen, self.project, self.programs, self.reporter)

    def hot(self, target: str) -> HotList:
        """Return a target's hot list; empty if it has none."""
        place = self.project.hot_list(self.name(target))
        return HotList.read(place) if place.is_file() else NONE

    def pack(
        self,
        built: building.Built,
        output: Path,
        options: squash.Options,
        cache: Cache | None,
    ) -> squash.Packed:
        """Pack a target's image."""
        return squash.pack_address(
            built.source, output, options, self.programs, self.reporter, cache
        )

    def prove(self, packed: squash.Packed) -> Outcome:
        """Return the outcome of a sqsh's smoke test: remembered if it passed, else run now."""
        return smoke_test.recall(packed.path, packed.key) or self.test(packed)

    def test(self, packed: squash.Packed) -> Outcome:
        """Run the smoke test on a sqsh; remember the outcome if it passed."""
        outcome = smoke_test.run(packed.path, self.programs, self.reporter)
        if outcome.ok:
            smoke_test.remember(packed.path, packed.key, outcome)
        return outcome


def wanted(
    target: str, recipes: Path, parameters: Mapping[str, str], platform: str | None = None
) -> tuple[recipe.Recipe, lock.Lock]:
    """Return a target's recipe and lock for a platform, with parameters set by hand.

    Raises `RequestError` for a parameter or a platform that the recipe does not have.
    """
    what = recipe.find(target, recipes, platform=platform)
    locked = lock.load(what, recipes)
    if not parameters:
        return what, locked
    other = recipe.find(target, recipes, parameters, platform)
    return other, lock.set_by_hand(locked, what, other)


@dataclass(frozen=True)
class Row:
    """A row of the quickstart's table: one step, or one check of the smoke test."""

    step: str
    what: str
    took: str
    size: str = ""


@dataclass(frozen=True)
class Report:
    """What the quickstart did, and the command that comes next."""

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


def quickstart(steps: Steps, target: str, since: float | None) -> Report:
    """Take a target from its recipe to a smoke-tested sqsh.

    `since` is when the set-up of the machine began, in seconds since the epoch, for the table.
    Raises the errors of the steps.
    """
    rows = []
    if since is not None:
        rows.append(Row("set up", "packages and .venv", duration(max(0.0, time.time() - since))))
    built = steps.build(target)
    rows.append(
        Row("image", built.source, _took(built.seconds, built.up_to_date), human(built.image.size))
    )
    options = squash.Options.of("shared", hot=steps.hot(target))
    packed = steps.pack(built, steps.sqsh(target), options, Cache.of_user())
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
        next_command=launch_command(packed.path, steps.programs)
        if outcome.ok
        else suggest.sqshforge("run", packed.path, "--", "bash"),
    )


def _took(seconds: float, done_before: bool) -> str:
    return DONE_BEFORE if done_before else duration(seconds)


def launch_command(image: Path, programs: Programs) -> str:
    """Return the command that starts a job from a sqsh if a Slurm cluster answers, else a shell."""
    nodes = _nodes(programs)
    launcher = launcher_of(image.absolute()) if nodes else None
    if launcher is None:
        return suggest.sqshforge("run", image, "--", "bash")
    job = shlex.join(["sbatch", f"--nodes={min(nodes, 2)}", suggest.shown(launcher)])
    return f"TRIAL=1 IMAGE={shlex.quote(suggest.shown(image))} {job}"


def _nodes(programs: Programs) -> int:
    """Return the number of nodes in Slurm's default partition; 0 if no cluster answers."""
    if programs.which("sbatch") is None or programs.which("sinfo") is None:
        return 0
    asked = programs.attempt(["sinfo", "--noheader", "--format=%P %D"], timeout=3)
    rows = [line.split() for line in asked.out.splitlines()] if asked.code == 0 else []
    return sum(int(row[1]) for row in rows if len(row) == 2 and row[0].endswith("*"))


def launcher_of(image: Path) -> Path | None:
    """Return this checkout's first launcher for the target that a sqsh was packed from, if any."""
    facts = request.read_record(image)
    try:
        home = find()
        target = dict(request.record_image(facts).labels).get(TARGET, "") if facts else ""
        names = recipe.find(target, home.recipes).launchers
    except SqshforgeError:
        return None
    return next((home.root / "launch" / f"{name}.sbatch" for name in names), None)
