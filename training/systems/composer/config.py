"""config.yaml of the Composer system, described completely and checked together. Light.

A token is counted as the system counts it: a sample of seq_len targets is seq_len + 1 tokens. So
10068787200tok of 896 samples of 4,096 are 2,743 steps, there as here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from training.config import lr_schedule as schedule
from training.config.lr_schedule import ScheduleConfig
from training.config.setting import faults as own_faults
from training.errors import RequestError
from training.systems.composer.sections import (
    SCHEDULES,
    DataSection,
    FsdpSection,
    GeneralSection,
    ModelSection,
    OptimizerSection,
    SchedulerSection,
    TrainerSection,
)

IDS = 1 << 16
"""Token ids that the words of packed files hold."""
SEED = 42
"""Of the first weights and the pattern of the mixture, as the system has it."""
_ALIKE = 1e-6
"""Two shares that differ by no more are the same."""


@dataclass(frozen=True, kw_only=True)
class ComposerConfig:
    """One run; raises RequestError with all its faults when it is made."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    scheduler: SchedulerSection = field(default_factory=SchedulerSection)
    fsdp: FsdpSection = field(default_factory=FsdpSection)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    general: GeneralSection = field(default_factory=GeneralSection)

    def __post_init__(self) -> None:
        found = _faults(self)
        if found:
            raise RequestError.of(found)

    @property
    def tokens_per_step(self) -> int:
        return self.data.global_batch_size * (self.data.seq_len + 1)

    @property
    def num_steps(self) -> int:
        """Steps of the run: the last one is that which reaches t_max."""
        value, unit = schedule.duration(self.scheduler.t_max)
        return int(value) if unit == "ba" else math.ceil(value / self.tokens_per_step)

    @property
    def schedule(self) -> ScheduleConfig:
        """Our schedule of the same formula."""
        one, name = self.scheduler, SCHEDULES[self.scheduler.name]
        return ScheduleConfig(
            name=name,
            t_warmup=one.t_warmup,
            t_max=one.t_max,
            t_decay=one.t_decay if name == "wsd" else ScheduleConfig.t_decay,
            alpha_f=one.alpha_f,
        )

    def run_name(self, parameters: int) -> str:
        """Name the run as the system does: its parameters in billions, and full_name."""
        return f"{parameters / 1e9:.1f}B_{self.general.full_name}"

    def folder(self, run_name: str) -> Path:
        return Path(self.trainer.save_folder.replace("{run_name}", run_name))


def check_ranks(config: ComposerConfig, world_size: int) -> None:
    """Raise RequestError if a step cannot be shared by so many ranks."""
    data = config.data
    if data.global_batch_size % (world_size * data.micro_batch_size):
        raise RequestError(
            f"data.global_batch_size: {data.global_batch_size} sequences are no whole number of "
            f"micro-batches of {data.micro_batch_size} on each of {world_size} ranks"
        )


def _faults(config: ComposerConfig) -> list[str]:
    """List what is wrong, each fault with its section and key."""
    found = [
        f"{section.name}.{fault}"
        for section in fields(config)
        for fault in own_faults(getattr(config, section.name))
    ]
    data, trainer = config.data, config.trainer
    if config.model.vocab_size > IDS:
        found.append(
            f"model.vocab_size: packed words hold ids below {IDS:,}, so it is at most that, "
            f"not {config.model.vocab_size:,}"
        )
    found += [
        f"optimizer.{name}: must be less than 1, is {value}"
        for name, value in (("beta1", config.optimizer.beta1), ("beta2", config.optimizer.beta2))
        if value >= 1
    ]
    found += _data_faults(data)
    if trainer.cp_interval not in ("", trainer.save_interval):
        found.append(
            "trainer.cp_interval: checkpoints are saved each save_interval, "
            f"{trainer.save_interval}; leave cp_interval out, or let it be the same"
        )
    for name in ("eval_interval", "save_interval"):
        found += _length_faults(f"trainer.{name}", getattr(trainer, name))
    found += _length_faults("scheduler.t_max", config.scheduler.t_max, ("tok", "ba"))
    for name in ("t_warmup", "t_decay"):
        found += _length_faults(f"scheduler.{name}", getattr(config.scheduler, name), least=0)
    if config.scheduler.name != "wsd" and config.scheduler.t_decay != SchedulerSection.t_decay:
        found.append(f"scheduler.t_decay: {config.scheduler.name} does not take it, but wsd")
    found += [
        f"trainer.{name}: must be at least 1, or -1 for all, not {getattr(trainer, name)}"
        for name in ("eval_subset_num_batches", "save_num_checkpoints_to_keep")
        if getattr(trainer, name) < 1 and getattr(trainer, name) != -1
    ]
    if "://" in trainer.save_folder:
        found.append("trainer.save_folder: must be a folder; of object stores there are none here")
    if "/" in config.general.full_name:
        found.append("general.full_name: is part of the names of files, which have no / in them")
    # Relations between settings are only asked of settings that are some.
    return found or _schedule_faults(config)


def _data_faults(data: DataSection) -> list[str]:
    found = [] if data.parts else ["data.text_paths: no data is given, nor in code_paths"]
    for name, parts, told in (
        ("text", data.text_paths, data.text_percentage),
        ("code", data.code_paths, data.code_percentage),
    ):
        share = math.fsum(part.weight for part in parts)
        if told is not None and abs(share - told) > _ALIKE:
            found.append(
                f"data.{name}_percentage: is {told}, and the weights of {name}_paths sum to "
                f"{share}; leave it out, it is derived from them"
            )
    if not data.num_workers and data.prefetch_factor != DataSection.prefetch_factor:
        found.append("data.prefetch_factor: only num_workers read ahead, and there are none")
    labels = [one.label for one in data.eval_paths]
    found += [
        f"data.eval_paths: {label} is the label of {labels.count(label)} of them; give each its own"
        for label in dict.fromkeys(labels)
        if labels.count(label) > 1
    ]
    if "train" in labels:
        found.append("data.eval_paths: train is what Composer calls the training data itself")
    return found


def _length_faults(
    name: str, text: str, units: Sequence[str] = ("tok", "ba", "dur"), *, least: int = 1
) -> list[str]:
    """List what is wrong with a length of time; a share of the run has no least."""
    try:
        value, unit = schedule.duration(text)
    except ValueError as error:
        return [f"{name}: must be {error}, not {text!r}"]
    if unit not in units:
        return [f"{name}: must be in {' or '.join(units)}, not {text!r}"]
    if unit != "dur" and (value < least or value != int(value)):
        return [f"{name}: must be a whole number of at least {least}, not {text!r}"]
    return []


def _schedule_faults(config: ComposerConfig) -> list[str]:
    """List what is wrong between the settings of a schedule, each of which is some."""
    try:
        schedule.check(
            config.schedule, config.num_steps, config.optimizer.lr, config.tokens_per_step
        )
    except RequestError as error:
        told = [line for line in str(error).splitlines() if not line.endswith(" faults")]
        return [f"scheduler.{line.removeprefix('  - ')}" for line in told]
    return []
