"""A target's way from recipe to proven sqsh, each step a no-op where nothing changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqshforge import build as building
from sqshforge import engine, recipe, smoke, source, squash, supply, vendor
from sqshforge.cache import Cache
from sqshforge.programs import Programs
from sqshforge.progress import Reporter
from sqshforge.project import Project


@dataclass(frozen=True)
class Steps:
    """The steps of one checkout, with the engine that was asked for (None: choose)."""

    project: Project
    engine_name: str | None
    programs: Programs
    reporter: Reporter

    def build(self, target: str) -> building.Built:
        """Build a target's image with the engine that was asked for or that is there."""
        what = recipe.find(target, self.project.recipes)
        chosen = engine.choose(self.engine_name, self.programs)
        return building.build(what, chosen, self.project.root, self.programs, self.reporter)

    def vendor(self, target: str) -> tuple[Path, supply.Bundle]:
        """Fill the bundle that a target is built from where there is no network."""
        what = recipe.find(target, self.project.recipes)
        chosen = engine.choose(self.engine_name, self.programs)
        return vendor.gather(what, chosen, self.project, self.programs, self.reporter)

    def pack(
        self,
        built: building.Built,
        output: Path,
        options: squash.Options,
        cache: Cache | None,
        way: source.Way = source.Way.OWN,
    ) -> squash.Packed:
        """Pack a target's image; `way` is how docker's are read."""
        return squash.pack(
            source.parse(built.source, self.programs, self.reporter, way),
            output,
            options,
            self.programs,
            self.reporter,
            cache,
        )

    def prove(self, packed: squash.Packed) -> smoke.Outcome:
        """The smoke test's outcome for a sqsh: remembered where it passed, else run now."""
        known = smoke.recall(packed.path, packed.key)
        if known is not None:
            return known
        outcome = smoke.run(packed.path, self.programs, self.reporter)
        if outcome.ok:
            smoke.remember(packed.path, packed.key, outcome)
        return outcome
