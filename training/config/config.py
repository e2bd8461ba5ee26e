"""A run, described completely: frozen dataclasses, checked together.

The doors turn their flags into a Config; nothing further down reads a flag. Light: no torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from training.config.faults import faults
from training.config.sections import DataConfig, ModelConfig, OptimConfig, ParallelConfig, RunConfig
from training.errors import RequestError

__all__ = ["Config", "DataConfig", "ModelConfig", "OptimConfig", "ParallelConfig", "RunConfig"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run; raises RequestError with all its faults when it is made."""

    model: ModelConfig
    data: DataConfig
    run: RunConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        found = faults(self.model, self.data, self.run, self.optim, self.parallel)
        if found:
            raise RequestError.of(found)
