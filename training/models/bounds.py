"""What each number of a model's sizes may be on its own. Light: nothing here needs torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

SHARES = frozenset(("hidden_dropout", "attention_dropout"))
MAYBE_ZERO = frozenset(("dt_init_floor", "balance_coefficient", "attention_multiplier"))
RELATED = frozenset(("dt_limit_low", "dt_limit_high", "rotary_pct"))
"""Those that their sizes check beside others. Of the rest, every fraction is more than 0."""


def faults(sizes: Any, least: Callable[[str], int]) -> list[str]:
    """List the numbers of a dataclass that are out of bounds; `least` is of whole ones."""
    found = []
    for name, kind in ((one.name, one.type) for one in fields(sizes)):
        # By the field's type: a file may have 0 for a fraction.
        value = getattr(sizes, name)
        if kind == "int" and value < least(name):
            found.append(f"{name}: must be at least {least(name)}, not {value}")
        elif kind == "float" and (must := _unmet(name, value)):
            found.append(f"{name}: must be {must}, not {value}")
    return found


def _unmet(name: str, value: float) -> str:
    """Say what a fraction must be and is not; NaN is within no bounds."""
    if name in RELATED:
        return ""
    if name in SHARES:
        return "" if 0 <= value < 1 else "at least 0 and less than 1"
    if name in MAYBE_ZERO:
        return "" if 0 <= value < math.inf else "at least 0 and finite"
    return "" if 0 < value < math.inf else "more than 0 and finite"
