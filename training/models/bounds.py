"""Bounds on the individual numbers of a model's sizes. No torch needed here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

SHARES = frozenset(("hidden_dropout", "attention_dropout"))
MAYBE_ZERO = frozenset(("dt_init_floor", "balance_coefficient", "attention_multiplier"))
RELATED = frozenset(("dt_limit_low", "dt_limit_high", "rotary_pct"))
"""Fields whose own classes check them against other fields. All other fractions must be above 0."""


def faults(sizes: Any, least: Callable[[str], int]) -> list[str]:
    """List the numbers of a dataclass that are out of bounds; `least` gives an int's minimum."""
    found = []
    for name, kind in ((one.name, one.type) for one in fields(sizes)):
        # Decide by the field's type, not the value's: a file may have the int 0 for a fraction.
        value = getattr(sizes, name)
        if kind == "int" and value < least(name):
            found.append(f"{name}: must be at least {least(name)}, not {value}")
        elif kind == "float" and (must := _unmet(name, value)):
            found.append(f"{name}: must be {must}, not {value}")
    return found


def _unmet(name: str, value: float) -> str:
    """Return the condition that a fraction violates, or ""; NaN violates all of them."""
    if name in RELATED:
        return ""
    if name in SHARES:
        return "" if 0 <= value < 1 else "at least 0 and less than 1"
    if name in MAYBE_ZERO:
        return "" if 0 <= value < math.inf else "at least 0 and finite"
    return "" if 0 < value < math.inf else "more than 0 and finite"
