"""config.yaml of the Composer system, described completely and checked as a whole. Needs no torch.

Each section is a dataclass, with the defaults of the system's create_mamba_config.

Tokens are counted as the system counts them: a sample of seq_len targets is seq_len + 1 tokens. So
10068787200tok in steps of 896 samples of 4,096 are 2,743 steps, there as here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from training.config import lr_schedule as schedule
from training.config.lr_schedule import ScheduleConfig
from training.config.setting import faults as own_faults
from training.config.setting import setting
from training.errors import RequestError
from training.models import MambaConfig

_INTERVAL = "1006878720tok"
SCHEDULES = {"wsd": "wsd", "cosine": "cosine-tokens"}
"""The system's names -> ours."""

IDS = 1 << 16
"""Number of token ids that a word of packed files can hold."""
SEED = 42
"""Seed of the initial weights and of the mixture's pattern, as in the system."""
_ALIKE = 1e-6
"""Two shares that differ by no more than this are equal."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the training data: packed files, by name or pattern."""

    path: str
    weight: float  # its share of the samples, before all shares are scaled to sum to 1
    order: int = 0  # the first of its samples to read


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Packed files to evaluate on; the label names them in logs."""

    path: str
    label: str


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Mamba's sizes, and whether its blocks are sharded and recomputed one by one."""

    vocab_size: int = setting(64000, "rows of each embedding", least=1)
    d_model: int = setting(1024, "width of the stream", least=1)
    n_layer: int = setting(48, "blocks", least=1)
    fsdp_layer_wrap: bool = setting(True, "shard each block by itself, else the model as one")
    activation_checkpointing: bool = setting(
        True, "recompute blocks in the backward pass, if fsdp says so too"
    )

    @property
    def sizes(self) -> MambaConfig:
        return MambaConfig(
            d_model=self.d_model,
            n_layer=self.n_layer,
            vocab_size=self.vocab_size,
            tie_embeddings=False,
            residual_in_fp32=False,
        )


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """What is read, and how much of it a step takes."""

    global_batch_size: int = setting(512, "sequences of a step, over all ranks", least=1)
    micro_batch_size: int = setting(
        4, "sequences of a rank that go through the model at once", least=1
    )
    eval_batch_size: int = setting(8, "the same, of an evaluation", least=1)
    seq_len: int = setting(4096, "tokens per sequence", least=1)
    num_workers: int = setting(1, "processes of a rank that read ahead; 0: none", least=0)
    prefetch_factor: int = setting(2, "batches that each of them reads ahead", least=1)
    n_total_tokens: int = setting(0, "tokens of all training data, 0 if not counted", least=0)
    n_samples_to_skip: int = setting(
        0, "samples at the start of the order that a new run skips", least=0
    )
    text_paths: tuple[Part, ...] = ()
    code_paths: tuple[Part, ...] = ()
    eval_paths: tuple[HeldOut, ...] = ()
    code_percentage: float | None = None  # must be the sum of code_paths' weights; None: any
    text_percentage: float | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.text_paths + self.code_paths


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """AdamW; all parameters are decayed."""

    lr: float = setting(2e-3, "peak of the learning rate", above=0)
    beta1: float = setting(0.9, "AdamW's decay rate for the mean of gradients", least=0)
    beta2: float = setting(0.95, "AdamW's decay rate for the mean of their squares", least=0)
    weight_decay: float = setting(0.1, "AdamW's, of all parameters", least=0)


@dataclass(frozen=True, kw_only=True)
class SchedulerSection:
    """The course of the learning rate, and the length of the run: t_max."""

    name: str = setting("cosine", "formulas: docs/training/schedules.md", choices=tuple(SCHEDULES))
    t_warmup: str = setting(_INTERVAL, "until when the rate rises")
    t_max: str = setting("10068787200tok", "length of the run")
    t_decay: str = setting(_INTERVAL, "wsd: how long the rate falls at the end")
    alpha_f: float = setting(0.1, "share of the peak that is left at the end", least=0)


@dataclass(frozen=True, kw_only=True)
class FsdpSection:
    """The settings of Composer's FSDP, which is used on GPUs."""

    sharding_strategy: str = setting(
        "FULL_SHARD",
        "what is shared",
        choices=("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"),
    )
    process_group: str = setting("", "ranks that share, as Composer names groups; empty: all")
    backward_prefetch: str = setting(
        "BACKWARD_PRE",
        "when the next unit is gathered",
        choices=("BACKWARD_PRE", "BACKWARD_POST", "NONE"),
    )
    activation_checkpointing_reentrant: bool = setting(True, "torch's older way to recompute")
    activation_checkpointing: bool = setting(True, "recompute what the model says")
    limit_all_gathers: bool = setting(False, "gather a unit only when an earlier one is freed")
    verbose: bool = setting(True, "let Composer log what it does")


@dataclass(frozen=True, kw_only=True)
class TrainerSection:
    """How often things happen, and where results go."""

    cp_interval: str = setting("", "the same as save_interval, which is what counts")
    eval_interval: str = setting(_INTERVAL, "between evaluations")
    save_interval: str = setting(_INTERVAL, "between checkpoints; one is saved at the end")
    eval_subset_num_batches: int = setting(16, "batches of an evaluation, -1 for all")
    save_folder: str = setting(
        "checkpoints", "folder; {run_name} in it is filled in", needed=True, is_path=True
    )
    save_num_checkpoints_to_keep: int = setting(-1, "newest checkpoints to keep, -1 for all")
    auto_log_hparams: bool = setting(True, "let Composer log its settings")
    autoresume: bool = setting(True, "go on from the newest checkpoint in save_folder")


@dataclass(frozen=True, kw_only=True)
class GeneralSection:
    """Names, and settings that fit no other section."""

    project_name: str = setting("mamba-science", "project in Weights & Biases", needed=True)
    full_name: str = setting("mambaoutai", "of the run, after its parameters", needed=True)
    window_size: int = setting(10, "steps over which speed is measured", least=1)
    clipping_threshold: float = setting(1.0, "largest global norm of the gradients", above=0)
    position_weighting: bool = setting(
        False, "weight a target the more, the further it is into its document"
    )


@dataclass(frozen=True, kw_only=True)
class ComposerConfig:
    """One run; raises RequestError with all its faults on creation."""

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
        """Steps of the run; the last one is that which reaches t_max."""
        value, unit = schedule.duration(self.scheduler.t_max)
        return int(value) if unit == "ba" else math.ceil(value / self.tokens_per_step)

    @property
    def schedule(self) -> ScheduleConfig:
        """Our schedule with the same formula."""
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
    """Raise RequestError if this many ranks cannot share a step."""
    data = config.data
    if data.global_batch_size % (world_size * data.micro_batch_size):
        raise RequestError(
            f"data.global_batch_size: {data.global_batch_size} sequences are not a whole number of "
            f"micro-batches of {data.micro_batch_size} on each of {world_size} ranks"
        )


def _faults(config: ComposerConfig) -> list[str]:
    """List the faults, each with its section and key."""
    found = [
        f"{section.name}.{fault}"
        for section in fields(config)
        for fault in own_faults(getattr(config, section.name))
    ]
    data, trainer = config.data, config.trainer
    if config.model.vocab_size > IDS:
        found.append(
            f"model.vocab_size: packed words hold ids below {IDS:,}, so it can be at most that, "
            f"not {config.model.vocab_size:,}"
        )
    found += [
        f"optimizer.{name}: must be less than 1, but is {value}"
        for name, value in (("beta1", config.optimizer.beta1), ("beta2", config.optimizer.beta2))
        if value >= 1
    ]
    found += _data_faults(data)
    if trainer.cp_interval not in ("", trainer.save_interval):
        found.append(
            "trainer.cp_interval: checkpoints are saved each save_interval, "
            f"{trainer.save_interval}; fix: leave cp_interval out, or make it the same"
        )
    for name in ("eval_interval", "save_interval"):
        found += _length_faults(f"trainer.{name}", getattr(trainer, name))
    found += _length_faults("scheduler.t_max", config.scheduler.t_max, ("tok", "ba"))
    for name in ("t_warmup", "t_decay"):
        found += _length_faults(f"scheduler.{name}", getattr(config.scheduler, name), least=0)
    if config.scheduler.name != "wsd" and config.scheduler.t_decay != SchedulerSection.t_decay:
        found.append(f"scheduler.t_decay: {config.scheduler.name} does not take it; wsd does")
    found += [
        f"trainer.{name}: must be at least 1, or -1 for all, not {getattr(trainer, name)}"
        for name in ("eval_subset_num_batches", "save_num_checkpoints_to_keep")
        if getattr(trainer, name) < 1 and getattr(trainer, name) != -1
    ]
    if "://" in trainer.save_folder:
        found.append("trainer.save_folder: must be a folder; object stores are not supported here")
    # Composer itself fills in names in braces, so that each rank may have its own folder.
    if others := _in_braces(trainer.save_folder.replace("{run_name}", "")):
        found.append(
            f"trainer.save_folder: all ranks save to one folder, and only {{run_name}} is filled "
            f"in, not {others}; fix: leave that out"
        )
    if others := _in_braces(config.general.full_name):
        found.append(
            f"general.full_name: is part of the names of files, and nothing in braces is filled "
            f"in; fix: leave {others} out"
        )
    if "/" in config.general.full_name:
        found.append("general.full_name: is part of the names of files, which have no / in them")
    # Check relations between settings only if each is valid on its own.
    return found or _schedule_faults(config)


def _in_braces(text: str) -> str:
    """Return the parts of a text that are in braces, braces included; empty if there are none."""
    return ", ".join(re.findall(r"\{[^{}]*\}|[{}]", text))


def _data_faults(data: DataSection) -> list[str]:
    found = [] if data.parts else ["data.text_paths: no data is given, here or in code_paths"]
    for name, parts, given in (
        ("text", data.text_paths, data.text_percentage),
        ("code", data.code_paths, data.code_percentage),
    ):
        share = math.fsum(part.weight for part in parts)
        if given is not None and abs(share - given) > _ALIKE:
            found.append(
                f"data.{name}_percentage: is {given}, but the weights of {name}_paths sum to "
                f"{share}; fix: leave it out, as it is derived from them"
            )
    if not data.num_workers and data.prefetch_factor != DataSection.prefetch_factor:
        found.append("data.prefetch_factor: only num_workers read ahead, and there are none")
    labels = [one.label for one in data.eval_paths]
    found += [
        f"data.eval_paths: {label} is the label of {labels.count(label)} of them; fix: give each "
        "its own"
        for label in dict.fromkeys(labels)
        if labels.count(label) > 1
    ]
    if "train" in labels:
        found.append("data.eval_paths: train is what Composer calls the training data itself")
    return found


def _length_faults(
    name: str, text: str, units: Sequence[str] = ("tok", "ba", "dur"), *, least: int = 1
) -> list[str]:
    """List the faults of a length of time; a share of the run must be above 0 if `least` is."""
    try:
        value, unit = schedule.duration(text)
    except ValueError as error:
        return [f"{name}: must be {error}, not {text!r}"]
    if unit not in units:
        return [f"{name}: must be in {' or '.join(units)}, not {text!r}"]
    if unit == "dur" and value == 0 < least:
        return [f"{name}: must be more than 0 of the run, not {text!r}"]
    if unit != "dur" and (value < least or value != int(value)):
        return [f"{name}: must be a whole number of at least {least}, not {text!r}"]
    return []


def _schedule_faults(config: ComposerConfig) -> list[str]:
    """List the conflicts between a schedule's settings, each of which is valid on its own."""
    try:
        schedule.check(
            config.schedule, config.num_steps, config.optimizer.lr, config.tokens_per_step
        )
    except RequestError as error:
        lines = [line for line in str(error).splitlines() if not line.endswith(" faults")]
        return [f"scheduler.{line.removeprefix('  - ')}" for line in lines]
    return []


def fsdp_settings(
    fsdp: FsdpSection, *, bf16: bool, world_size: int, local_world_size: int
) -> dict[str, Any]:
    """Return the dictionary that Composer 0.23 and later take as parallelism_config["fsdp"].

    Weights are float32; with bf16 the units compute in bfloat16, and gradients are summed in
    float32. This is not left to Composer's own precision, which would also cast inside our kernels.
    """
    found: dict[str, Any] = {
        "sharding_strategy": fsdp.sharding_strategy,
        "backward_prefetch": fsdp.backward_prefetch,
        "activation_checkpointing_reentrant": fsdp.activation_checkpointing_reentrant,
        "activation_checkpointing": fsdp.activation_checkpointing,
        "limit_all_gathers": fsdp.limit_all_gathers,
        "verbose": fsdp.verbose,
        "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "bf16"}
        if bf16
        else "FULL",
        "state_dict_type": "full",
    }
    if fsdp.process_group:
        found["process_group"] = fsdp.process_group
    elif fsdp.sharding_strategy == "HYBRID_SHARD":
        # Without these Composer makes a single group of all ranks, and shards fully over it.
        found["data_parallel_shard_degree"] = local_world_size
        found["data_parallel_replicate_degree"] = world_size // local_world_size
    return found
