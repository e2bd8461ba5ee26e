"""One recipe laid over another: pure, on data as YAML gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqshforge.recipe.schema import normalize


def over(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe is that extends another.

    Mappings are laid over each other. Lists add to the parent's; an entry for a package that the
    parent names takes its place. `null` takes the parent's value away, so that the default holds.
    """
    whole = dict(parent)
    for key, value in child.items():
        before = whole.get(key)
        if value is None:
            whole.pop(key, None)
        elif isinstance(before, Mapping) and isinstance(value, Mapping):
            whole[key] = over(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            whole[key] = _joined(before, value)
        else:
            whole[key] = value
    return whole


def _joined(parent: Sequence[Any], child: Sequence[Any]) -> list[Any]:
    """The parent's entries, less those that the child pins otherwise, and then the child's."""
    own = {_name(entry) for entry in child}
    return [*(entry for entry in parent if _name(entry) not in own), *child]


def _name(entry: Any) -> str:
    """What an entry of a list is about: a package's name, or the entry itself."""
    if isinstance(entry, Mapping):
        entry = entry.get("package", entry)
    return normalize(entry) if isinstance(entry, str) and "==" in entry else repr(entry)
