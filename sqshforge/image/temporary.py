"""Temporary containers and folders, named so that a killed packer's leftovers can be removed."""

from __future__ import annotations

from collections.abc import Iterable

from sqshforge.host import temporary

KIND = "pack"


def name() -> str:
    """A name for a working container that tells its owner: a killed packer cannot remove it."""
    return temporary.name(KIND)


def abandoned(names: Iterable[str]) -> list[str]:
    """The names of packers of this machine that have ended."""
    return temporary.abandoned(names, KIND)
