"""Containers and folders for a while, named so that what a killed packer left can go."""

from __future__ import annotations

from collections.abc import Iterable

from sqshforge.host import temporary

KIND = "pack"


def name() -> str:
    """A name for a working container that says whose it is: a killed packer cannot remove it."""
    return temporary.name(KIND)


def abandoned(names: Iterable[str]) -> list[str]:
    """The names, among all, that are of packers of this machine that are no more."""
    return temporary.abandoned(names, KIND)
