"""Pins and what is newer: judge them by the answers of their sources, show them as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from packaging.version import Version

from sqshforge.errors import MissingError
from sqshforge.outdated.names import Offer

if TYPE_CHECKING:
    from rich.table import Table

Kind = Literal["package", "image", "source", "archive", "Debian"]


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One pin of a recipe, and what was found out about it.

    `fits` is the newest version that the other pins allow, by their own metadata; None if that is
    not known. `newest` is None if it could not be found out, and `silent` says why. `moved` says
    that the same tag, branch or suite now has other content than in the lock.
    """

    target: str
    kind: Kind
    name: str
    pinned: str
    fits: str | None = None
    newest: str | None = None
    moved: str = ""
    held_by: tuple[str, ...] = ()
    comment: str = ""  # what the recipe says beside the pin
    silent: str = ""

    @property
    def state(self) -> Literal["newest", "outdated", "not asked"]:
        if self.newest is None:
            return "not asked"
        return "outdated" if self.moved or self.newest != self.pinned else "newest"

    def data(self) -> dict[str, Any]:
        """Return all fields and the state, for JSON."""
        return {**asdict(self), "state": self.state}

    def remarks(self) -> str:
        """Return what the table says beside the versions."""
        notes = [self.silent, self.moved, *self.held_by]
        notes += [f"# {self.comment}"] if self.comment and self.state == "outdated" else []
        return "; ".join(filter(None, notes))


def judged(pin: Pin, offers: Sequence[Offer], python: str) -> Pin:
    """Return a package's pin with the newest version, and whether that needs another Python."""
    if not offers:
        return replace(pin, silent="no index that was asked has it")
    top = max(offers, key=lambda one: Version(one.version))
    if Version(top.version) <= Version(pin.pinned):
        ahead = Version(Version(top.version).public) < Version(Version(pin.pinned).public)
        only = (f"the index has nothing newer than {top.version}",) if ahead else ()
        return replace(pin, newest=pin.pinned, fits=pin.pinned, held_by=only)
    other = f"{top.version} needs Python {top.python}, and the recipe has {python}"
    return replace(pin, newest=top.version, held_by=(other,) if top.python else ())


def candidate(pin: Pin, offers: Sequence[Offer]) -> str | None:
    """Return the newest version above the pin that the recipe's own Python takes, if any."""
    own = [one.version for one in offers if not one.python]
    top = max(own, key=Version, default=None)
    return top if top is not None and Version(top) > Version(pin.pinned) else None


def is_other_build(pinned: str, version: str) -> bool:
    """Whether the pin is of a particular build, such as +cpu, and the version is not."""
    own = Version(pinned).local
    return own is not None and Version(version).local != own


def counts(pins: Sequence[Pin]) -> str:
    """Return how many pins are in each state, as one line."""
    states = [pin.state for pin in pins]
    return (
        f"{len(pins)} pins: {states.count('newest')} newest, {states.count('outdated')} outdated, "
        f"{states.count('not asked')} not asked"
    )


def require_answers(pins: Sequence[Pin]) -> None:
    """Raise `MissingError` if no source has answered."""
    if pins and all(pin.state == "not asked" for pin in pins):
        reasons = dict.fromkeys(pin.silent for pin in pins)
        raise MissingError(
            "no source of versions answered:" + "".join(f"\n    {one}" for one in reasons),
            fix="check the network, the proxy and pip's settings (docs/start/machines.md)",
        )


def table(pins: Sequence[Pin]) -> Table:
    """Return a table of the pins that are not the newest; targets with the same row share it."""
    from rich.table import Table

    rows: dict[Pin, list[str]] = {}
    for pin in pins:
        if pin.state != "newest":
            rows.setdefault(replace(pin, target=""), []).append(pin.target)
    many = len({pin.target for pin in pins}) > 1
    drawn = Table()
    for title in (
        "pin",
        "pinned",
        "fits",
        "newest",
        "held back by",
        *(["targets"] if many else []),
    ):
        drawn.add_column(title, overflow="fold")
    for pin, targets in rows.items():
        name = pin.name if pin.kind == "package" else f"{pin.kind} {pin.name}"
        cells = [name, pin.pinned, pin.fits or "?", pin.newest or "?", pin.remarks()]
        drawn.add_row(*cells, *([", ".join(targets)] if many else []))
    return drawn
