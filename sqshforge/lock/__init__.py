"""Locks: what a recipe resolved to, with hashes, so that every build uses the same bytes."""

from sqshforge.lock.model import (
    Lock,
    LockedImage,
    LockedPackage,
    changes,
    earlier,
    inherited,
    inputs,
    load,
    path_of,
    read,
    requirements,
    set_by_hand,
)
from sqshforge.lock.python import parse_compiled
from sqshforge.lock.resolve import Asked, resolve

__all__ = [
    "Asked",
    "Lock",
    "LockedImage",
    "LockedPackage",
    "changes",
    "earlier",
    "inherited",
    "inputs",
    "load",
    "parse_compiled",
    "path_of",
    "read",
    "requirements",
    "resolve",
    "set_by_hand",
]
