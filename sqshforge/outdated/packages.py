"""Python packages: ask uv what the indexes have, and what fits with the other pins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sqshforge.host import temporary
from sqshforge.host.programs import Programs, Result
from sqshforge.host.terminal import Tracker
from sqshforge.lock.python import (
    SILENT,
    VendorIndex,
    metadata,
    parse_compiled,
    require_uv,
    uv_compile,
    uv_indexes,
    uv_platform,
    uv_question,
    vendor_indexes,
)
from sqshforge.network.access import Pip, uv_environment
from sqshforge.network.mirrors import Mirrors
from sqshforge.outdated.names import Comments, Offer, parse_offers, reason
from sqshforge.outdated.pins import Pin, candidate, is_other_build, judged
from sqshforge.recipe import Recipe, normalize

Offers = Mapping[str, tuple[Offer, ...]]


@dataclass(frozen=True)
class Together:
    """Pins that must fit together; `built` names the packages that are compiled."""

    key: tuple[str, ...]  # where they are in the recipe
    pins: tuple[str, ...]
    built: frozenset[str] = frozenset()

    def with_other(self, name: str, wanted: str) -> list[str]:
        """Return all the pins, with `wanted` in place of one package's."""
        return [wanted if normalize(one) == name else one for one in self.pins]


@dataclass(frozen=True)
class Packages:
    """Looks up one recipe's packages, in the same indexes as `sqshforge lock`.

    `known` keeps uv's answers, so that targets that share pins ask only once.
    """

    recipe: Recipe
    pip: Pip
    mirrors: Mirrors
    programs: Programs
    comments: Comments
    tracker: Tracker
    known: dict[tuple[object, ...], Result] = field(default_factory=dict)

    def pins(self) -> list[Pin]:
        """Return every package that the recipe pins, with what is newer."""
        python = self.recipe.python
        built = frozenset(normalize(one.package) for one in python.built)
        groups = [
            Together(("python", "packages"), tuple(self.recipe.packages()), built),
            Together(("python", "builders"), python.builders),
            Together(("python", "installer"), (python.installer,)),
        ]
        found = self._bound()
        lacking = sorted({pin.silent for pin in found if pin.silent})
        for group in groups:
            main = group.key == ("python", "packages")
            found += self._group(group, "; ".join(lacking) if main else "", main)
        return found

    def _bound(self) -> list[Pin]:
        """Look up the packages that only one index may provide, each in that index alone."""
        found = []
        for name, index in self.recipe.python.indexes.items():
            address = self.mirrors.index(index.url)
            alone = replace(self.pip, index=address, extra_indexes=(), find_links=())
            offers = self._offers(index.pins(), alone)
            for wanted in index.pins():
                pin = self._pin(wanted, ("python", "indexes", name, "packages"))
                if offers is None:
                    found.append(replace(pin, silent=f"the index {name} does not answer"))
                else:
                    own = offers.get(pin.name, ())
                    found.append(judged(pin, own, self.recipe.python.version))
        return found

    def _group(self, group: Together, unknown: str, main: bool) -> list[Pin]:
        """Look up the pins of one group; `unknown`, if not empty, says why what fits is not known.

        `main`: these are the image's packages, which must also fit with the bound ones.
        """
        python = self.recipe.python
        pins = [self._pin(one, group.key) for one in group.pins]
        offers = self._offers(group.pins, self.pip)
        if offers is None:
            return [replace(pin, silent="the package index does not answer") for pin in pins]
        first = vendor_indexes(self.recipe, self.mirrors) if main else ()
        bound = [one for index in python.indexes.values() for one in index.pins()] if main else []
        group = replace(group, pins=(*group.pins, *bound))
        pins = [judged(pin, offers.get(pin.name, ()), python.version) for pin in pins]
        if all(pin.state != "outdated" for pin in pins):
            return pins
        pip = None if unknown else self._pip_for(group, first)
        if pip is None:
            unknown = f"what fits is not known: {unknown or 'the pins as they are do not resolve'}"
        return [
            self._fitting(pin, group, offers.get(pin.name, ()), pip, first, unknown)
            if pin.state == "outdated"
            else pin
            for pin in pins
        ]

    def _fitting(
        self,
        pin: Pin,
        group: Together,
        offers: Sequence[Offer],
        pip: Pip | None,
        first: Sequence[VendorIndex],
        unknown: str,
    ) -> Pin:
        """Return a pin with the newest that fits with the others, and what holds back a newer one.

        `pip` is the configuration with which the pins resolve; None if there is none, and `unknown`
        says why.
        """
        held = [*pin.held_by, *self._patches(pin.name)]
        wanted = candidate(pin, offers)
        if wanted is None:
            return replace(pin, fits=pin.pinned, held_by=tuple(held))
        if pin.name in group.built:
            held.append("it is compiled here: its metadata does not tell what it needs")
            return replace(pin, held_by=tuple(held))
        if is_other_build(pin.pinned, wanted):
            local = pin.pinned.partition("+")[2]
            held.append(f"the pin is of the build +{local}, and {wanted} is not")
            return replace(pin, held_by=tuple(held))
        if pip is None:
            return replace(pin, held_by=(*held, unknown))
        self.tracker.note(f"{pin.name} {wanted}")
        tried = f"{pin.name}=={wanted}"
        answer = self._fits(group.with_other(pin.name, tried), pip, first)
        if answer.code == 0:
            return replace(pin, fits=wanted, held_by=tuple(held))
        if SILENT.search(answer.err):
            return replace(pin, held_by=(*held, "what fits is not known: an index fell silent"))
        held.append(reason(answer.err, tried))
        lower = self._fits(group.with_other(pin.name, f"{pin.name}>={pin.pinned}"), pip, first)
        versions = {one.name: one.version for one in parse_compiled(lower.out)}
        return replace(pin, fits=versions.get(pin.name), held_by=tuple(held))

    def _pin(self, wanted: str, key: tuple[str, ...]) -> Pin:
        """Return a requirement of the recipe as a pin, about which nothing is known yet."""
        keys = (key, (*key[:-1], "built", "package"))  # the latter if the package is compiled
        said = next(
            (self.comments[one, wanted] for one in keys if (one, wanted) in self.comments), ""
        )
        return Pin(
            target=self.recipe.target,
            kind="package",
            name=normalize(wanted),
            pinned=wanted.partition("==")[2],
            comment=said,
        )

    def _patches(self, name: str) -> list[str]:
        """Return a remark on each patch that is for the pinned version of a package."""
        sources = {normalize(one.package): one.source for one in self.recipe.python.built}
        keys = dict.fromkeys(filter(None, (name, sources.get(name))))
        files = [file for key in keys for file in self.recipe.patches.get(key, ())]
        return [f"its patch is for this version: {file}" for file in files]

    def _offers(self, pins: Sequence[str], pip: Pip) -> Offers | None:
        """Return each package's newest versions, for each Python from the recipe's on.

        Indexes in local folders hide files of others, so they are asked only for what is missing.
        None if an index does not answer.
        """
        found = self._offered(pins, pip.without_local_indexes())
        rest = [one for one in pins if found is not None and normalize(one) not in found]
        if found is not None and rest and pip.without_local_indexes() != pip:
            found = {**found, **(self._offered(rest, pip) or {})}
        return found

    def _offered(self, pins: Sequence[str], pip: Pip) -> Offers | None:
        """Return what one configuration of pip offers; None if an index does not answer.

        If no index has one of the names, uv gives no answer for any: then each is asked alone.
        """
        if not pins:
            return {}
        names = [normalize(one) for one in pins]
        answer = self._ask(names, pip, universal=True)
        if answer.code == 0:
            return parse_offers(
                answer.out, self.recipe.python.version, self.recipe.platform.machine
            )
        if SILENT.search(answer.err):
            return None
        if len(pins) == 1:
            return {}
        each = [self._offered([one], pip) for one in pins]
        return None if None in each else {k: v for one in each if one for k, v in one.items()}

    def _pip_for(self, group: Together, first: Sequence[VendorIndex]) -> Pip | None:
        """Return the configuration with which the pins resolve; None if they do not as they are.

        As in a lock, indexes in local folders are used only if the others lack something.
        """
        for pip in dict.fromkeys((self.pip.without_local_indexes(), self.pip)):
            if self._fits(group.pins, pip, first).code == 0:
                return pip
        return None

    def _fits(self, wanted: Sequence[str], pip: Pip, first: Sequence[VendorIndex]) -> Result:
        return self._ask(wanted, pip, first, universal=False)

    def _ask(
        self,
        wanted: Sequence[str],
        pip: Pip,
        first: Sequence[VendorIndex] = (),
        *,
        universal: bool,
    ) -> Result:
        """Call uv once: if `universal` for the names alone, else with all their dependencies."""
        argv = uv_compile(self.recipe)
        if universal:
            argv += ["--universal", "--no-deps"]
        else:
            argv += ["--python-platform", uv_platform(self.recipe.platform)]
        argv += uv_indexes(pip, first)
        facts = _no_metadata(self.recipe) if universal else metadata(self.recipe)
        question = (tuple(argv), tuple(wanted), tuple(first), facts)
        if question not in self.known:
            with temporary.folder("outdated") as place:
                asked_for = uv_question(place, self.recipe, wanted, first)
                (place / "uv.toml").write_text(facts)
                argv += ["--config-file", str(place / "uv.toml"), str(asked_for)]
                self.known[question] = self.programs.attempt(argv, env=uv_environment(pip))
            require_uv(self.known[question])
        return self.known[question]


def _no_metadata(recipe: Recipe) -> str:
    """Return uv configuration by which compiled packages need nothing, so that uv builds none."""
    names = [normalize(one.package) for one in recipe.python.built]
    tables = (f"name = {json.dumps(name)}\nrequires-dist = []\n" for name in names)
    return "".join(f"[[dependency-metadata]]\n{one}" for one in tables)
