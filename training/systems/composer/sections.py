"""The sections of the Composer system's config.yaml, a dataclass each. Light.

Defaults are those of the system's create_mamba_config.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.config.setting import setting
from training.models import MambaConfig

_INTERVAL = "1006878720tok"
SCHEDULES = {"wsd": "wsd", "cosine": "cosine-tokens"}
"""The system's names -> ours."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the training data: packed files, by name or pattern."""

    path: str
    weight: float  # its share of the samples, before all shares are made to sum to 1
    order: int = 0  # the first of its samples that is read


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Packed files that are evaluated on; the label names them in logs."""

    path: str
    label: str


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Mamba's sizes, and which of its blocks are units."""

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
    seq_len: int = setting(4096, "tokens of a sequence", least=1)
    num_workers: int = setting(1, "processes of a rank that read ahead; 0: none", least=0)
    prefetch_factor: int = setting(2, "batches that each of them reads ahead", least=1)
    n_total_tokens: int = setting(0, "tokens of all training data, 0 if not counted", least=0)
    n_samples_to_skip: int = setting(0, "samples of the order that a new run leaves out", least=0)
    text_paths: tuple[Part, ...] = ()
    code_paths: tuple[Part, ...] = ()
    eval_paths: tuple[HeldOut, ...] = ()
    code_percentage: float | None = None  # as the weights of code_paths sum; None: whatever
    text_percentage: float | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.text_paths + self.code_paths


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """AdamW; all parameters are decayed."""

    lr: float = setting(2e-3, "peak of the learning rate", above=0)
    beta1: float = setting(0.9, "AdamW's mean of gradients", least=0)
    beta2: float = setting(0.95, "AdamW's mean of their squares", least=0)
    weight_decay: float = setting(0.1, "AdamW's, of all parameters", least=0)


@dataclass(frozen=True, kw_only=True)
class SchedulerSection:
    """How the learning rate goes, and how long the run is: t_max."""

    name: str = setting("cosine", "formulas: docs/schedules.md", choices=tuple(SCHEDULES))
    t_warmup: str = setting(_INTERVAL, "until when the rate rises")
    t_max: str = setting("10068787200tok", "length of the run")
    t_decay: str = setting(_INTERVAL, "wsd: how long the rate falls at the end")
    alpha_f: float = setting(0.1, "share of the peak that is left at the end", least=0)


@dataclass(frozen=True, kw_only=True)
class FsdpSection:
    """What Composer's FSDP is told, where there are GPUs."""

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
    limit_all_gathers: bool = setting(False, "gather a unit only when one before is let go")
    verbose: bool = setting(True, "let Composer log what it does")


@dataclass(frozen=True, kw_only=True)
class TrainerSection:
    """What happens how often, and where to."""

    cp_interval: str = setting("", "the same as save_interval, which is what counts")
    eval_interval: str = setting(_INTERVAL, "between evaluations")
    save_interval: str = setting(_INTERVAL, "between checkpoints; one is saved at the end")
    eval_subset_num_batches: int = setting(16, "batches of an evaluation, -1 for all")
    save_folder: str = setting("checkpoints", "folder; {run_name} in it is filled in", needed=True)
    save_num_checkpoints_to_keep: int = setting(-1, "newest checkpoints to keep, -1 for all")
    auto_log_hparams: bool = setting(True, "let Composer log its settings")
    autoresume: bool = setting(True, "go on from the newest checkpoint in save_folder")


@dataclass(frozen=True, kw_only=True)
class GeneralSection:
    """Names, and what the other sections have no place for."""

    project_name: str = setting("mamba-science", "project in Weights & Biases", needed=True)
    full_name: str = setting("mambaoutai", "of the run, after its parameters", needed=True)
    window_size: int = setting(10, "steps over which speed is measured", least=1)
    clipping_threshold: float = setting(1.0, "largest global norm of the gradients", above=0)
    position_weighting: bool = setting(False, "a target counts the more, the further it is in")
