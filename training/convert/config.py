"""Read a config.json, and make sizes of its values, checked by type. No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from training.errors import RequestError
from training.models import FAMILIES, RopeScaling, Sizes

_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "bool": ("true or false", (bool,)),
    "str": ("a word", (str,)),
    "RopeScaling | None": ("a table or null", (RopeScaling, type(None))),
}
"""A field's declared type -> what its value must be, in words and as types."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises RequestError if it does not."""
    try:
        held = json.loads(path.read_text())
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RequestError(f"{path} is not JSON: {error}") from error
    if not isinstance(held, dict):
        raise RequestError(f"{path} does not hold a JSON object")
    return held


def read_table(settings: Mapping[str, Any], name: str, where: Path) -> dict[str, Any]:
    """Find a table in a file's settings; empty if it is null or missing.

    Raises RequestError if it is something else.
    """
    table = settings.get(name) or {}
    if not isinstance(table, dict):
        raise RequestError(f"{where}: {name} must be a table, not {table!r}")
    return table


def is_one_of(word: Any, known: Container[str]) -> bool:
    """Return whether a value is one of these words; in a file it may also be a list or a table."""
    return isinstance(word, str) and word in known


def are_numbers(*values: Any) -> bool:
    """Return whether all values are numbers; `make` reports those that are not."""
    return all(type(value) in (int, float) for value in values)


def make(
    family: str,
    values: Mapping[str, Any],
    where: Path,
    called: Mapping[str, str] | None = None,
    faults: list[str] | None = None,
) -> Sizes:
    """Make the sizes of a family from values by our names.

    called: our names -> the file's names, for messages. faults: those found before. Raises
    RequestError listing all faults, each with the file.
    """
    kind = FAMILIES[family]
    found = [*(faults or ()), *_faults(kind, values, called or {})]
    try:
        if not found:
            return kind(**values)
    except RequestError as error:
        found = error.faults
    raise RequestError.of([f"{where}: {fault}" for fault in found])


def _faults(kind: type, values: Mapping[str, Any], called: Mapping[str, str]) -> list[str]:
    """List values that are missing, unknown or of another type than their field."""
    known = {field.name: field for field in fields(kind)}
    found = [f"{name} is not a size of this family" for name in values if name not in known]
    for name, field in known.items():
        shown = called.get(name, name)
        meant, accepted = _KINDS[str(field.type)]
        if name in values and type(values[name]) not in accepted:
            found.append(f"{shown} must be {meant}, not {values[name]!r}")
        elif name not in values and field.default is MISSING:
            found.append(f"{shown} is missing")
    return found


def read_rank(rank: Any, width: Any, faults: list[str], called: str) -> dict[str, Any]:
    """Read the rank of Mamba's delta projection, a number or "auto", into our dt_rank.

    It becomes 0, which is ours for the rank that follows from the width, if it is equal to that.
    """
    if rank is None or rank == "auto" or type(width) is not int:
        return {}
    if type(rank) is not int or rank < 1:
        faults.append(f"{called} must be a whole number of at least 1, or auto, not {rank!r}")
        return {}
    return {"dt_rank": 0 if rank == math.ceil(width / 16) else rank}


def read_limit(limit: Any, faults: list[str], called: str) -> dict[str, Any]:
    """Read the limits of Mamba-2's delta into our dt_limit_low and dt_limit_high; null: none."""
    if limit is None:
        return {}
    # Transformers writes infinity as {"__float__": "Infinity"}.
    numbers = [
        math.inf if one == {"__float__": "Infinity"} else one
        for one in (limit if isinstance(limit, list | tuple) else [limit])
    ]
    if len(numbers) != 2 or not are_numbers(*numbers) or not 0 <= numbers[0] < numbers[1]:
        faults.append(f"{called} must be two numbers of at least 0, the smaller first, not {limit}")
        return {}
    low, high = (float(one) for one in numbers)
    return {"dt_limit_low": low, "dt_limit_high": 0.0 if high == math.inf else high}
