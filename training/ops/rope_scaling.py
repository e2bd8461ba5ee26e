"""Scaling of rotary angles to longer contexts. It is one of a model's sizes: no torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from training.errors import RequestError

USES: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_context"),
    "llama3": ("factor", "original_context", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "original_context", "beta_fast", "beta_slow", "attention_factor"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        *("factor", "original_context", "short_factor", "long_factor", "attention_factor"),
    ),
}
"""Kind -> the fields that it uses; all others keep their defaults."""

BY_LENGTH = ("dynamic", "longrope")
"""Kinds whose angles depend on the length of the text."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary angles are stretched beyond the context that a model was trained with.

    kind:
      linear: divides all positions by `factor` (Chen et al. 2023, arXiv:2306.15595).
      dynamic: raises theta as a text grows beyond `original_context`: with `factor` 1 the slowest
        pair then turns as far over the text as it did over that context ("dynamic NTK"; Peng et
        al. 2023, arXiv:2309.00071, section 3.3).
      llama3: slows low frequencies by `factor`, keeps high ones, and blends between (Llama 3.1's
        model card; Dubey et al. 2024, arXiv:2407.21783).
      yarn: the same with a ramp over the channels, between those that turn `beta_fast` and
        `beta_slow` times within `original_context`, and sharper attention (Peng et al. 2023,
        sections 3.2 to 3.4). `truncate` rounds the ramp's ends to whole channels.
      longrope: divides each frequency by its own number, from `short_factor` up to
        `original_context` positions and from `long_factor` beyond (Ding et al. 2024,
        arXiv:2402.13753).
    attention_factor: factor of yarn and longrope on queries and keys; None: derived from `factor`
      (yarn: and from `mscale` and `mscale_all_dim`, if neither is 0).

    Raises RequestError listing all faults.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    attention_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RopeScaling:
        """Create from plain values, as in a file. Raises RequestError listing the faults."""
        known = {field.name: str(field.type) for field in fields(cls)}
        found = [
            f"rope_scaling: {name} is not one of {', '.join(known)}"
            for name in values
            if name not in known
        ]
        needed = [name for name in ("kind", "factor") if name not in values]
        found += [f"rope_scaling: {name} must be given" for name in needed]
        made: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if name in known
        }
        for name, value in made.items():
            must, accepted = _KINDS[known[name]]
            numbers = value if isinstance(value, tuple) else ()
            if type(value) not in accepted or not all(type(one) in _NUMBER for one in numbers):
                found.append(f"rope_scaling: {name} must be {must}, not {values[name]!r}")
        if found:
            raise RequestError.of(found)
        return cls(**made)

    def __post_init__(self) -> None:
        if self.kind not in USES:
            raise RequestError(f"rope_scaling: must be one of {', '.join(USES)}, not {self.kind!r}")
        found = [
            f"rope_scaling: {self.kind} has no {field.name}; fix: leave it out"
            for field in fields(self)
            if field.name not in ("kind", *USES[self.kind])
            and getattr(self, field.name) != field.default
        ]
        found += [
            f"rope_scaling: {name} must be finite, not {value}"
            for name, values in asdict(self).items()
            for value in (values if isinstance(values, tuple) else (values,))
            if isinstance(value, float) and not math.isfinite(value)
        ]
        if not self.factor >= 1:
            found.append(f"rope_scaling: factor must be at least 1, not {self.factor}")
        # longrope divides by the logarithm of the context.
        least = 2 if self.kind == "longrope" else 1
        if self.original_context < least:
            found.append(f"rope_scaling: original_context must be at least {least}")
        if self.attention_factor is not None and not self.attention_factor > 0:
            found.append("rope_scaling: attention_factor must be more than 0")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            found.append("rope_scaling: low_freq_factor must be below high_freq_factor")
        if self.kind == "yarn" and not 0 < self.beta_slow <= self.beta_fast:
            found.append("rope_scaling: beta_slow must be more than 0, and at most beta_fast")
        if self.mscale < 0 or self.mscale_all_dim < 0:
            found.append("rope_scaling: mscale and mscale_all_dim must not be negative")
        if not all(number > 0 for number in self.short_factor + self.long_factor):
            found.append("rope_scaling: short_factor and long_factor must be more than 0")
        if found:
            raise RequestError.of(found)

    def used(self) -> dict[str, Any]:
        """Return the fields that the kind uses, as plain values."""
        return {name: value for name, value in asdict(self).items() if name in USES[self.kind]}

    def faults(self, d: int, theta: float) -> list[str]:
        """List what does not fit heads of d channels, and `theta`."""
        if self.kind == "dynamic" and d == 2:
            return ["rope_scaling: dynamic needs heads of more than 2 channels"]
        if self.kind == "yarn" and theta <= 1:
            return [f"rope_scaling: yarn needs a rope_theta of more than 1, not {theta}"]
        if self.kind != "longrope":
            return []
        return [
            f"rope_scaling: {name} has {len(given)} numbers, but a head of {d} channels has "
            f"{d // 2} pairs; fix: give one for each"
            for name in ("short_factor", "long_factor")
            if len(given := getattr(self, name)) != d // 2
        ]


_NUMBER = (int, float)
_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "str": ("a word", (str,)),
    "int": ("a whole number", (int,)),
    "float": ("a number", _NUMBER),
    "bool": ("true or false", (bool,)),
    "float | None": ("a number or null", (*_NUMBER, type(None))),
    "tuple[float, ...]": ("a list of numbers", (tuple,)),
}
"""A field's annotation -> what its value must be, in words and in types."""
