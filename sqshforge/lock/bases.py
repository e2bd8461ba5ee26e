"""Ask registries whether the base images of recipes are still where the recipes say.

A vendor may delete a tag, and some time later its image too; a digest in a lock does not keep it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sqshforge.host.programs import Programs
from sqshforge.lock.model import Lock
from sqshforge.network.mirrors import Mirrors
from sqshforge.network.registries import TIMEOUT, Answer, Registries, State, host_of, pinned
from sqshforge.recipe import Recipe

AT_ONCE = 8  # images asked for at the same time: most of the time is spent waiting


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A problem with an image; `lost` if no build can get it any more."""

    image: str
    what: str
    fix: str
    lost: bool = False

    def lines(self) -> list[str]:
        return [f"{self.image}: {self.what}", f"  fix:   {self.fix}"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """An image that targets start from or compile in, and its digest in their locks.

    `has_bootstrap`: each of these targets can also make it from packages.
    """

    addresses: tuple[str, ...]
    digest: str | None
    targets: tuple[str, ...]
    has_bootstrap: bool


def wanted(found: Iterable[tuple[Recipe, Lock | None]]) -> list[Wanted]:
    """Return the images of recipes, with their digests in the locks; each pair only once."""
    whole: dict[tuple[tuple[str, ...], str | None], Wanted] = {}
    for recipe, lock in found:
        locked = [one for one in (lock.base, lock.compiler) if one] if lock else []
        for image in recipe.images:
            name = recipe.tagged(image)
            digest = next((one.digest for one in locked if one.image == name), None)
            key = (recipe.addresses(image), digest)
            made = image == recipe.base.image and recipe.base.bootstrap is not None
            known = whole.get(key)
            whole[key] = Wanted(
                addresses=key[0],
                digest=key[1],
                targets=(*(known.targets if known else ()), recipe.target),
                has_bootstrap=made and (known is None or known.has_bootstrap),
            )
    return list(whole.values())


def look(
    images: Sequence[Wanted],
    mirrors: Mirrors,
    registries: Registries,
    programs: Programs,
    timeout: float = TIMEOUT,
) -> list[Remark]:
    """Ask for each image at all of its addresses; return a remark on each that has a problem.

    Images for which no registry answers share a single remark, and none of them counts as lost.
    """

    def ask(one: Wanted) -> list[Answer]:
        names = [mirrors.image(address) for address in one.addresses]
        return [_asked(name, one.digest, registries, programs, timeout) for name in names]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = list(zip(images, pool.map(ask, images), strict=True))
    silent = [
        (one.addresses[0], answers[0].said)
        for one, answers in asked
        if all(answer.state is State.SILENT for answer in answers)
    ]
    remarks = [_remark(one, answers) for one, answers in asked]
    return [*filter(None, remarks), *_unasked(silent)]


def _asked(
    name: str, digest: str | None, registries: Registries, programs: Programs, timeout: float
) -> Answer:
    """Ask an address for an image's tag; if that is gone or has moved, for the locked digest."""
    said = registries.ask(name, programs, timeout)
    if digest in (None, said.digest) or said.state not in (State.THERE, State.ABSENT):
        return said
    return registries.ask(pinned(name, digest), programs, timeout)


def _remark(one: Wanted, answers: Sequence[Answer]) -> Remark | None:
    """Return the remark on an image; None if it is where it should be or no registry answered."""
    image, recipe = one.addresses[0], f"recipes/{one.targets[0]}.yaml"
    gone = [answer for answer in answers if answer.state is State.ABSENT]
    kept = [answer for answer in answers if answer.state is State.CLOSED]
    there = [answer for answer in answers if answer.state is State.THERE]
    has_moved = "@" in answers[0].name and bool(there) and answers[0] is there[0]
    if not (gone or kept or has_moved) or (there and not gone and not has_moved):
        return None
    parts = [f"is gone{_at(answer, image)} ({answer.said})" for answer in gone]
    parts += [f"cannot be seen{_at(answer, image)} ({answer.said})" for answer in kept]
    if has_moved:
        parts.append("has lost its tag, or the tag names another image now")
    if there:
        parts.append(f"is still at {there[0].name}")
    elif one.has_bootstrap:
        parts.append("is made from its packages instead")
    fix = f"name an address that has it in base.mirrors of {recipe} (docs/images/recipes.md)"
    if kept and not there and not gone:
        fix = f"skopeo login {host_of(kept[0].name)}, or {fix}"
    return Remark(
        image=image,
        what="; ".join(parts),
        fix=fix,
        lost=len(gone) == len(answers) and not one.has_bootstrap,
    )


def _at(answer: Answer, image: str) -> str:
    """Return the words for where an answer came from; empty for the image's own tag."""
    name, at, _ = answer.name.partition("@")
    place = "" if image.startswith(name) else f" at {name}"
    return f"{place} by the digest of the lock too" if at else place


def _unasked(silent: Sequence[tuple[str, str]]) -> list[Remark]:
    """Return a single remark on all images for which no registry answered, if there are any."""
    if not silent:
        return []
    image, reason = silent[0]
    others = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
    return [
        Remark(
            image=f"{image}{others}",
            what=f"no registry answers, so whether anything is gone is not known ({reason})",
            fix="check the network and the proxy, or name a mirror (docs/images/offline.md)",
        )
    ]
