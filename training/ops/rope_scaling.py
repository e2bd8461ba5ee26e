"""How far rotary angles reach. Light: a model's sizes have it, and nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass

from training.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary angles are stretched beyond the context that a model was trained with.

    kind: `linear` divides all positions by `factor` (Chen et al. 2023); `llama3` slows low
    frequencies by `factor`, keeps high ones, and blends between (Llama 3.1's model card).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        found = []
        if self.kind not in ("linear", "llama3"):
            found.append(f"rope_scaling: must be linear or llama3, not {self.kind!r}")
        if not self.factor >= 1:
            found.append(f"rope_scaling: factor must be at least 1, is {self.factor}")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            found.append("rope_scaling: low_freq_factor must be below high_freq_factor")
        if found:
            raise RequestError.of(found)
