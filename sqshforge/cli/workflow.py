"""A target's way from recipe to proven sqsh, each step a no-op where nothing changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sqshforge import engine, lock, recipe
from sqshforge.build import build as building
from sqshforge.build import bundle as vendor
from sqshforge.build import inputs
from sqshforge.errors import RequestError
from sqshforge.host import rootless
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.image import address as source
from sqshforge.project import Project
from sqshforge.run import smoke_test
from sqshforge.squash import pack as squash
from sqshforge.squash.cache import Cache


@dataclass(frozen=True)
class Steps:
    """The steps of one checkout, with the engine that was asked for (None: choose)."""

    project: Project
    engine_name: str | None
    programs: Programs
    reporter: Reporter
    parameters: Mapping[str, str] = field(default_factory=dict)

    def build(self, target: str) -> building.Built:
        """Build a target's image with the engine that was asked for or that is there."""
        what, locked = self._wanted(target)
        chosen = engine.choose(self.engine_name, self.programs)
        return building.build(what, locked, chosen, self.project.root, self.programs, self.reporter)

    def _wanted(self, target: str) -> tuple[recipe.Recipe, lock.Lock]:
        """A target's recipe and lock, with the parameters that were set by hand.

        Raises `RequestError` for a parameter that the recipe does not have.
        """
        what = recipe.find(target, self.project.recipes)
        locked = lock.load(what, self.project.recipes)
        try:
            wanted = what.setting(self.parameters)
        except ValueError as error:
            where = f"--set, for recipes/{target}.yaml"
            raise RequestError(str(error), where=where, mend="--set NAME=VALUE") from None
        return wanted, lock.set_by_hand(locked, what, wanted)

    def vendor(self, target: str) -> tuple[Path, inputs.Bundle]:
        """Fill the bundle that a target is built from where there is no network."""
        what, locked = self._wanted(target)
        chosen = engine.choose(self.engine_name, self.programs)
        return vendor.gather(what, locked, chosen, self.project, self.programs, self.reporter)

    def pack(
        self,
        built: building.Built,
        output: Path,
        options: squash.Options,
        cache: Cache | None,
        way: source.Way = source.Way.LENT,
    ) -> squash.Packed:
        """Pack a target's image; `way` is how docker's are read."""
        return pack(built.source, output, options, self.programs, self.reporter, cache, way)

    def prove(self, packed: squash.Packed) -> smoke_test.Outcome:
        """The smoke test's outcome for a sqsh: remembered where it passed, else run now."""
        known = smoke_test.recall(packed.path, packed.key)
        if known is not None:
            return known
        outcome = smoke_test.run(packed.path, self.programs, self.reporter)
        if outcome.ok:
            smoke_test.remember(packed.path, packed.key, outcome)
        return outcome


def pack(
    address: str,
    output: Path,
    options: squash.Options,
    programs: Programs,
    reporter: Reporter,
    cache: Cache | None,
    way: source.Way = source.Way.LENT,
) -> squash.Packed:
    """Pack the image at an address, as root or as an ordinary user.

    Raises what `squash.pack` and `rootless.call` raise.
    """

    def work() -> squash.Packed:
        image = source.parse(address, programs, reporter, way)
        return squash.pack(image, output, options, programs, reporter, cache)

    return rootless.call_as_root(work, address, programs)
