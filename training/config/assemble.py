"""A configuration from settings by name: what all doors make of their flags.

No two sections have a setting of the same name, so that a name alone says which one is meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from training.config.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
)
from training.config.flags import Flag
from training.config.lr_schedule import TAKES, ScheduleConfig
from training.config.setting import settings

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "schedule": ScheduleConfig,
    "parallel": ParallelConfig,
    "run": RunConfig,
}
SCHEDULE = Flag("schedule", str, ScheduleConfig.name, f"of the learning rate: {', '.join(TAKES)}")


def flags(aliases: Mapping[str, tuple[str, ...]]) -> list[Flag]:
    """Give a flag for every setting, under its own name and its aliases."""
    found = []
    for section in SECTIONS.values():
        if section is ScheduleConfig:
            found.append(SCHEDULE)
        for one in settings(section):
            flag = Flag.of(one, aliases.get(one.name, ()))
            if section is ScheduleConfig:
                those = ", ".join(name for name, takes in TAKES.items() if one.name in takes)
                flag = replace(flag, help=f"{those}: {flag.help}")
            found.append(flag)
    return found


def assemble(given: Mapping[str, Any], model: Mapping[str, Any]) -> Config:
    """Make the configuration of a model from settings by name. Raises RequestError.

    model: name and sizes. Settings that are not given have their defaults.
    """

    def part(section: type) -> dict[str, Any]:
        return {one.name: given[one.name] for one in settings(section) if one.name in given}

    schedule = {"name": given["schedule"]} if "schedule" in given else {}
    return Config(
        model=ModelConfig(**model, **part(ModelConfig)),
        data=DataConfig(**part(DataConfig)),
        optim=OptimConfig(
            schedule=ScheduleConfig(**schedule, **part(ScheduleConfig)), **part(OptimConfig)
        ),
        parallel=ParallelConfig(**part(ParallelConfig)),
        run=RunConfig(**part(RunConfig)),
    )
