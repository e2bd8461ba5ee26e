"""A run, described completely: frozen dataclasses, checked together, written beside the results.

The doors turn their flags into a Config; nothing further down reads a flag. Light: no torch here.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from training.errors import RequestError, writing
from training.models import Sizes
from training.parallel import degrees
from training.schedule import ScheduleConfig
from training.setting import faults as own_faults
from training.setting import setting

PACKAGES = (
    *("torch", "triton", "mamba-ssm", "causal-conv1d", "flash-attn", "numpy"),
    *("safetensors", "datasets", "tokenizers", "transformers", "mosaicml"),
)
"""What a run's losses and speed may depend on, where it is installed."""

BACKENDS = ("fsdp", "neuron", "smp")
"""The ways of training.parallel.backend."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model: its name, the sizes that the name stands for, and where its values begin."""

    name: str
    sizes: Sizes
    init_weights: str = setting(
        "",
        "folder of weights to start from, as training.convert reads them, or one file of them; "
        "empty: random ones",
    )
    init_hub: str = setting(
        "",
        "model of the hub to start from; its files go to init_weights, or where the library keeps "
        "them if that is empty",
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read; batch_size counts sequences of one rank that go through the model at once.

    A step takes gradient_accumulation such batches.
    """

    dataset_path: str = setting("", "what is trained on (docs/data.md)", needed=True)
    data_cache: str = setting(
        "", "folder that data at a URL (s3://...) is copied to; empty: one for temporary files"
    )
    dataset_config: str = setting("", "stream: a set's configuration, such as en")
    dataset_split: str = setting("train", "stream, set on disk: the part that is read")
    tokenizer: str = setting("", "stream: bytes, or a tokenizer's file, folder or name in the hub")
    shuffle_buffer: int = setting(
        1000, "stream: documents that one sequence of a global batch mixes, 1 for none", least=1
    )
    stream_retries: int = setting(
        5, "stream: tries after a fault of the network, one after the other", least=0
    )
    seq_length: int = setting(4096, "tokens of a sequence", least=1)
    batch_size: int = setting(2, "sequences of one rank that go through the model at once", least=1)
    gradient_accumulation: int = setting(1, "such batches in one step", least=1)
    epochs: int = setting(
        0, "passes over the data after which a run ends early, 0 for no limit", least=0
    )
    n_samples_to_skip: int = setting(0, "sequences of the order that a new run leaves out", least=0)
    position_weighting: bool = setting(
        False, "packed: let a target count the more, the further it is into its document"
    )
    num_workers: int = setting(0, "processes that read ahead; 0: a thread does", least=0)
    prefetch: int = setting(2, "batches that are read ahead, 0 for none", least=0)
    eval_dataset_path: str = setting("", "held-out data of the same kinds; empty: no evaluation")
    eval_split: str = setting("validation", "stream, set on disk: the part that is held out")
    eval_batch_size: int = setting(0, "batch_size of an evaluation, 0 for the same", least=0)
    eval_batches: int = setting(10, "batches of one rank in an evaluation, 0 for all", least=0)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, and how its learning rate goes."""

    learning_rate: float = setting(3e-4, "peak, after the warm-up", above=0)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    grad_clip_thresh: float = setting(4.0, "largest global norm of the gradients", above=0)
    weight_decay: float = setting(0.1, "AdamW's; not for A_log, D, biases and norms", least=0)
    decay_all: bool = setting(False, "weight decay for A_log, D, biases and norms too")
    beta1: float = setting(0.9, "AdamW's mean of gradients", least=0)
    beta2: float = setting(0.95, "AdamW's mean of their squares", least=0)
    eps: float = setting(1e-8, "AdamW's least denominator", above=0)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is spread, and what is traded for memory."""

    backend: str = setting("fsdp", "what spreads the run over its ranks", choices=BACKENDS)
    sharding_strategy: str = setting(
        "fsdp", "over all ranks, within groups of them, or none", choices=("fsdp", "hsdp", "ddp")
    )
    shard_group_size: int = setting(
        0, "hsdp: ranks that share a copy; 0 for those of a node", least=0
    )
    tensor_parallel: int = setting(1, "ranks that share the work of each layer", least=1)
    fsdp_engine: str = setting(
        "auto", "fsdp2 where torch has it", choices=("auto", "fsdp1", "fsdp2")
    )
    reshard_after_forward: bool = setting(
        True,
        "let a block's gathered weights go after its forward pass; False keeps them for the "
        "backward pass",
    )
    forward_prefetch: bool = setting(
        False, "gather the next block's weights before a block computes, not beside it"
    )
    backward_prefetch: str = setting(
        "pre",
        "gather the next block's weights before (pre) or after (post, fsdp1) a block's gradients",
        choices=("pre", "post"),
    )
    limit_all_gathers: bool = setting(
        True, "fsdp1: gather a layer only when one before is let go (fsdp2 always does)"
    )
    low_cpu_fsdp: bool = setting(False, "start on the meta device: no rank holds the whole model")
    precision: str = setting(
        "auto",
        "auto: bf16 on a GPU that has it; weights stay fp32",
        choices=("auto", "bf16", "fp32"),
    )
    fp8: bool = setting(
        False, "linear layers of the blocks multiply in float8 where that can be; told where not"
    )
    smp_transform: bool = setting(
        False, "smp: put the library's own layers in place of the model's"
    )
    fp8_amax_history_len: int = setting(
        1024, "smp: steps whose largest values scale float8", least=1
    )
    fp8_amax_compute_algo: str = setting(
        "max",
        "smp: which of these scales, the largest or the last",
        choices=("max", "most_recent"),
    )
    reduce_precision: str = setting(
        "auto",
        "of gradients between ranks; auto: that of precision",
        choices=("auto", "bf16", "fp32"),
    )
    fsdp_activation_checkpointing: bool = setting(False, "recompute blocks in the backward pass")
    selective_checkpointing: int = setting(1, "recompute every N-th block only", least=1)
    checkpointing_policy: str = setting(
        "full",
        "what a recomputed block keeps: its input, or (selective) its matrix products and "
        "attention too",
        choices=("full", "selective"),
    )
    offload_activations: bool = setting(
        False, "keep what the backward pass of the blocks needs in the host's memory"
    )
    activation_loading_horizon: int = setting(
        2, "with that: blocks whose activations are back before they are needed", least=1
    )
    cpu_offload: bool = setting(
        False, "keep weights, gradients and the optimizer in the host's memory"
    )
    use_torch_compile: bool = setting(False, "compile the blocks")
    zero1: bool = setting(
        False, "backend=neuron: the ranks that read data share the optimizer's work and state"
    )
    master_weights: bool = setting(
        True, "backend=neuron: with precision=bf16, the optimizer's own weights are float32"
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long, where to, and what is told on the way."""

    save_ckpt_path: str = setting(
        "", "folder of the results; its newest checkpoint is resumed from", needed=True
    )
    load_ckpt_path: str = setting(
        "",
        "folder of another run, or one of its checkpoints, to start from while save_ckpt_path has "
        "no checkpoint",
    )
    mirror_url: str = setting(
        "", "URL that checkpoints are copied to and fetched from, as s3://bucket/prefix"
    )
    num_steps: int = setting(2000, "steps of the whole run", least=1)
    report_interval: int = setting(200, "steps between lines of the log", least=1)
    checkpoint_interval: int = setting(
        20000, "steps between checkpoints; one is saved at the end", least=1
    )
    eval_interval: int = setting(0, "steps between evaluations; 0: at the end only", least=0)
    keep_checkpoints: int = setting(0, "newest checkpoints to keep, 0 for all", least=0)
    keep_every: int = setting(0, "with that: keep those of every so many steps too", least=0)
    async_checkpoint: bool = setting(True, "go on training while a checkpoint is written (fsdp2)")
    final_model_dir: str = setting(
        "", "folder that the trained model is written to at the end, in Hugging Face's format"
    )
    seed: int = setting(2023, "of the initial weights and the order of the data", least=0)
    same_seed: bool = setting(False, "let all ranks draw the same dropouts")
    device: str = setting(
        "auto",
        "what computes; xla: a Neuron device, for backend=neuron",
        choices=("auto", "cpu", "cuda", "xla"),
    )
    progress: bool = setting(True, "a bar on a terminal")
    tensorboard_dir: str = setting("", "folder of TensorBoard's events; empty: none")
    tensorboard_tags: str = setting(
        "own", "what its curves are called: own names, or those of SMP v2", choices=("own", "smp")
    )
    average_interval: int = setting(
        0, "steps between lines with the mean speed of all since step 30; 0: none", least=0
    )
    use_wandb: bool = setting(False, "tell Weights & Biases (WANDB_MODE, WANDB_API_KEY count)")
    wandb_project: str = setting("sqshforge", "its project")
    wandb_dir: str = setting("", "folder of its files; empty: save_ckpt_path")
    wandb_run_id: str = setting("", "the run to go on with; empty: one of save_ckpt_path's own")
    use_profiler: bool = setting(False, "trace steps 4 to 6 into save_ckpt_path/profile_traces")
    use_nsight: bool = setting(
        False, "name steps and their parts for nsys, which records from step 4 on"
    )
    track_memory: bool = setting(
        False, "tell the memory of host and GPU in the first step, at evaluations and at saves"
    )
    clean_cache: bool = setting(False, "give a GPU's unused memory back before every step")
    compile_only: bool = setting(
        False, "take a few steps, whatever they give, and save nothing: a pass to compile graphs"
    )
    on_nan: str = setting(
        "stop",
        "what a loss or gradient that is no number makes of the run or step",
        choices=("stop", "skip"),
    )
    trace_nan: bool = setting(False, "name the module that gives one, and the samples; slow")
    hang_seconds: int = setting(
        30, "seconds without progress after which the ranks that hang are named, 0: never", least=0
    )
    hang_abort_seconds: int = setting(
        600, "seconds without progress after which the run is ended, 0: never", least=0
    )

    @property
    def checkpoint_folders(self) -> list[str]:
        """Where a checkpoint to go on from is looked for, in this order."""
        return [folder for folder in (self.save_ckpt_path, self.load_ckpt_path) if folder]


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run; raises RequestError with all its faults when it is made."""

    model: ModelConfig
    data: DataConfig
    run: RunConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        found = faults(self)
        if found:
            raise RequestError.of(found)


def faults(config: Config) -> list[str]:
    """List what is wrong with a configuration, each fault with the name of its setting."""
    data, optim, parallel, run = config.data, config.optim, config.parallel, config.run
    found = [fault for section in (data, optim, parallel, run) for fault in own_faults(section)]
    found += [
        f"{name}: must be less than 1, is {value}"
        for name, value in (("beta1", optim.beta1), ("beta2", optim.beta2))
        if value >= 1
    ]
    if run.keep_every and not run.keep_checkpoints:
        found.append("keep_every: all checkpoints are kept already, as keep_checkpoints is 0")
    if run.eval_interval and not data.eval_dataset_path:
        found.append("eval_interval: there is no eval_dataset_path to evaluate on")
    if run.tensorboard_tags != "own" and not run.tensorboard_dir:
        found.append("tensorboard_tags: counts only with tensorboard_dir")
    unset = RunConfig()
    found += [
        f"{name}: counts only with use_wandb"
        for name in ("wandb_project", "wandb_dir", "wandb_run_id")
        if not run.use_wandb and getattr(run, name) != getattr(unset, name)
    ]
    if run.hang_seconds and 0 < run.hang_abort_seconds <= run.hang_seconds:
        found.append("hang_abort_seconds: must be more than hang_seconds, or 0 for never")
    found += _data_faults(data)
    if parallel.shard_group_size and parallel.sharding_strategy != "hsdp":
        found.append("shard_group_size: only sharding_strategy=hsdp has shard groups")
    if parallel.sharding_strategy == "ddp" and not parallel.reshard_after_forward:
        found.append("reshard_after_forward: with sharding_strategy=ddp nothing is gathered")
    found += _backend_faults(config)
    found += _memory_faults(parallel)
    return found


FSDP_ONLY = (
    *("sharding_strategy", "shard_group_size", "fsdp_engine", "limit_all_gathers", "low_cpu_fsdp"),
    *("reduce_precision", "offload_activations", "cpu_offload", "use_torch_compile"),
    *("reshard_after_forward", "forward_prefetch", "backward_prefetch", "fp8"),
)
NEURON_ONLY = ("zero1", "master_weights")
SMP_ONLY = ("smp_transform", "fp8_amax_history_len", "fp8_amax_compute_algo")
_UNHEEDED = {
    "fsdp": (*NEURON_ONLY, *SMP_ONLY),
    "neuron": (*FSDP_ONLY, *SMP_ONLY),
    "smp": NEURON_ONLY,  # what else it does not heed it tells itself
}
"""Backend -> the settings that it has no use for."""


def _backend_faults(config: Config) -> list[str]:
    """List what the backend would not heed, or cannot spread."""
    parallel, sizes = config.parallel, config.model.sizes
    found = [
        f"{name}: backend={parallel.backend} does not heed it; leave it out"
        for name in _UNHEEDED[parallel.backend]
        if getattr(parallel, name) != getattr(ParallelConfig, name)
    ]
    if parallel.backend == "neuron":
        if not parallel.master_weights and parallel.precision != "bf16":
            found.append("master_weights: False counts only with precision=bf16")
        return [*found, *degrees.neuron_faults(sizes, parallel.tensor_parallel)]
    if config.run.device == "xla":
        found.append("device: xla takes backend=neuron")
    if parallel.backend == "smp":
        return found  # its library shares layers in a way of its own
    degree = parallel.tensor_parallel
    return found + degrees.faults(sizes, degree, parallel.fsdp_engine, parallel.use_torch_compile)


STREAM_ONLY = (
    "dataset_config",
    "tokenizer",
    "shuffle_buffer",
    "stream_retries",
)


def _data_faults(data: DataConfig) -> list[str]:
    """List settings that what is read would not heed."""
    found = []
    paths = (data.dataset_path, data.eval_dataset_path)
    if not any(path.startswith("stream:") for path in paths):
        found += [
            f"{name}: only a stream heeds it (dataset_path=stream:...)"
            for name in STREAM_ONLY
            if getattr(data, name) != getattr(DataConfig, name)
        ]
    if data.num_workers and not data.prefetch:
        found.append("prefetch: num_workers read ahead, so it must be at least 1 with them")
    if data.eval_batch_size and not data.eval_dataset_path:
        found.append("eval_batch_size: there is no eval_dataset_path to evaluate on")
    return found


def _memory_faults(parallel: ParallelConfig) -> list[str]:
    """List what only says how something is traded for memory that is not traded."""
    found = []
    if not parallel.fsdp_activation_checkpointing:
        found += [
            f"{name}: only fsdp_activation_checkpointing=True recomputes blocks"
            for name in ("selective_checkpointing", "checkpointing_policy")
            if getattr(parallel, name) != getattr(ParallelConfig, name)
        ]
    elif parallel.checkpointing_policy == "selective" and parallel.use_torch_compile:
        found.append(
            "checkpointing_policy: selective sees no operation of compiled blocks; use full, or "
            "leave out use_torch_compile"
        )
    horizon = parallel.activation_loading_horizon
    if horizon != ParallelConfig.activation_loading_horizon and not parallel.offload_activations:
        found.append("activation_loading_horizon: only offload_activations=True loads activations")
    return found


def write_resolved(config: Config, folder: Path, world_size: int) -> Path:
    """Write config.json: every setting with its value, and the versions that ran it."""
    record: dict[str, Any] = {
        "config": dataclasses.asdict(config),
        "world_size": world_size,
        "versions": versions(),
    }
    path = folder / "config.json"
    with writing(path):
        path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def versions() -> dict[str, str]:
    """Tell the versions of what a run's losses and speed may depend on."""
    found = {name: _version(name) for name in PACKAGES}
    return {
        "python": platform.python_version(),
        **{name: version for name, version in found.items() if version},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
