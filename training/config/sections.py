"""The sections of a configuration: every setting with its default and its meaning.

Flags, keys of files, help and checks come from them (training.config.setting). No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from training.config.lr_schedule import ScheduleConfig
from training.config.setting import setting
from training.models import Sizes

BACKENDS = ("fsdp", "neuron", "smp")
"""The ways of training.parallel.backend."""
STREAM = "stream:"
"""Prefix for the name of a data set that is tokenized as it is read."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model: its name, the sizes that the name stands for, and its initial weights."""

    name: str
    sizes: Sizes
    init_weights: str = setting(
        "",
        "folder of weights to start from, as training.convert reads them, or one file of them; "
        "empty: random ones",
        is_path=True,
    )
    init_hub: str = setting(
        "",
        "model on the hub to start from; its files go to init_weights, or where the library keeps "
        "them if that is empty",
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data. batch_size counts the sequences that go through the model of one rank at once.

    A step takes gradient_accumulation such batches, or as many as make up global_batch.
    """

    dataset_path: str = setting(
        "", "what is trained on (docs/training/data.md)", needed=True, is_path=True
    )
    data_cache: str = setting(
        "",
        "folder for copies of data at URLs (s3://...; empty: one for temporary files), and for "
        "lines: whose own folder is read-only",
        is_path=True,
    )
    dataset_config: str = setting("", "stream: a set's configuration, such as en")
    dataset_split: str = setting("train", "stream, set on disk: the part that is read")
    tokenizer: str = setting(
        "", "stream: bytes, or a tokenizer's file, folder or name on the hub", is_path=True
    )
    shuffle_buffer: int = setting(
        1000, "stream: documents that one sequence of a global batch mixes, 1 for none", least=1
    )
    stream_retries: int = setting(5, "stream: retries in a row after a network error", least=0)
    reset_documents: bool | None = setting(
        None,
        "restart state, convolution, attention and positions at each document; auto: where the "
        "data knows its documents",
    )
    document_end: int = setting(
        -1,
        "set on disk, lines: the id that ends a document, where the data does not say; -1: none",
        least=-1,
    )
    seq_length: int = setting(4096, "tokens per sequence", least=1)
    batch_size: int = setting(2, "sequences of one rank that go through the model at once", least=1)
    gradient_accumulation: int = setting(1, "batches in one step", least=1)
    global_batch: int = setting(
        0,
        "sequences in one step, over all ranks: gives gradient_accumulation for any number of "
        "ranks; 0: not fixed",
        least=0,
    )
    epochs: int = setting(
        0, "passes over the data after which a run ends early, 0 for no limit", least=0
    )
    n_samples_to_skip: int = setting(
        0, "sequences at the start of the order that a new run skips", least=0
    )
    position_weighting: bool = setting(
        False, "packed: weight a target the more, the further it is into its document"
    )
    num_workers: int = setting(0, "processes that read ahead; 0: a thread does", least=0)
    prefetch: int = setting(2, "batches that are read ahead, 0 for none", least=0)
    eval_dataset_path: str = setting(
        "", "held-out data of the same kinds; empty: no evaluation", is_path=True
    )
    eval_split: str = setting("validation", "stream, set on disk: the part that is held out")
    eval_batch_size: int = setting(0, "batch_size of an evaluation, 0 for the same", least=0)
    eval_batches: int = setting(10, "batches of one rank in an evaluation, 0 for all", least=0)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, and the schedule of its learning rate."""

    learning_rate: float = setting(3e-4, "peak, after the warm-up", above=0)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    grad_clip_thresh: float = setting(4.0, "largest global norm of the gradients", above=0)
    weight_decay: float = setting(0.1, "AdamW's; not for A_log, D, biases and norms", least=0)
    decay_all: bool = setting(False, "weight decay for A_log, D, biases and norms too")
    beta1: float = setting(0.9, "AdamW's decay rate for the mean of gradients", least=0)
    beta2: float = setting(0.95, "AdamW's decay rate for the mean of their squares", least=0)
    eps: float = setting(1e-8, "AdamW's smallest denominator", above=0)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is spread over ranks, and what is traded for memory."""

    backend: str = setting("fsdp", "what distributes the run over its ranks", choices=BACKENDS)
    sharding_strategy: str = setting(
        "fsdp", "over all ranks, within groups of them, or none", choices=("fsdp", "hsdp", "ddp")
    )
    shard_group_size: int = setting(
        0, "hsdp: ranks that share a copy; 0 for those of a node", least=0
    )
    tensor_parallel: int = setting(1, "ranks that share the work of each layer", least=1)
    context_parallel: int = setting(
        1, "ranks, or tensor groups of them, that each have a piece of every sequence", least=1
    )
    fsdp_engine: str = setting(
        "auto", "fsdp2 where torch has it", choices=("auto", "fsdp1", "fsdp2")
    )
    reshard_after_forward: bool = setting(
        True,
        "free a block's gathered weights after its forward pass; False keeps them for the "
        "backward pass",
    )
    forward_prefetch: bool = setting(
        False, "gather the next block's weights before a block computes, not meanwhile"
    )
    backward_prefetch: str = setting(
        "pre",
        "gather the next block's weights before (pre) or after (post, fsdp1) a block's gradients",
        choices=("pre", "post"),
    )
    limit_all_gathers: bool = setting(
        True, "fsdp1: gather a layer only when an earlier one is freed (fsdp2 always does)"
    )
    low_cpu_fsdp: bool = setting(False, "start on the meta device: no rank holds the whole model")
    precision: str = setting(
        "auto",
        "auto: bf16 on a GPU that has it; weights stay fp32",
        choices=("auto", "bf16", "fp32"),
    )
    fp8: bool = setting(
        False, "linear layers of the blocks multiply in float8 where possible; logs where not"
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
        2, "with that: blocks whose activations are loaded before they are needed", least=1
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
    """How long a run is, where its results go, and what it reports on the way."""

    save_ckpt_path: str = setting(
        "",
        "folder of the results; its newest checkpoint is resumed from",
        needed=True,
        is_path=True,
    )
    load_ckpt_path: str = setting(
        "",
        "folder of another run, or one of its checkpoints, to start from while save_ckpt_path has "
        "no checkpoint; it must have one, of fewer steps than num_steps, unless it is the same "
        "folder",
        is_path=True,
    )
    mirror_url: str = setting(
        "", "URL that checkpoints are copied to and fetched from, such as s3://bucket/prefix"
    )
    num_steps: int = setting(2000, "steps of the whole run", least=1)
    report_interval: int = setting(200, "steps between lines of the log", least=1)
    checkpoint_interval: int = setting(
        20000, "steps between checkpoints; one is saved at the end", least=1
    )
    checkpoint_minutes: float | None = setting(
        0.0,
        "minutes after a checkpoint at which the next is saved anyway, 0: never; auto: by the "
        "number of nodes and how long a save stops training (docs/training/checkpoints.md)",
        least=0,
    )
    eval_interval: int = setting(0, "steps between evaluations; 0: at the end only", least=0)
    keep_checkpoints: int = setting(0, "newest checkpoints to keep, 0 for all", least=0)
    keep_every: int = setting(0, "with that: keep those of every so many steps too", least=0)
    async_checkpoint: bool = setting(True, "go on training while a checkpoint is written (fsdp2)")
    checkpoint_in_memory: bool | None = setting(
        None,
        "keep the newest checkpoint in the nodes' memory too, from which a restart in place reads "
        "it; auto: where that takes at most a quarter of the free memory "
        "(docs/training/checkpoints.md)",
    )
    final_model_dir: str = setting(
        "",
        "folder that the trained model is written to at the end, in Hugging Face's format",
        is_path=True,
    )
    seed: int = setting(2023, "of the initial weights and the order of the data", least=0)
    same_seed: bool = setting(False, "let all ranks draw the same dropouts")
    device: str = setting(
        "auto",
        "what computes; xla: a Neuron device, for backend=neuron",
        choices=("auto", "cpu", "cuda", "xla"),
    )
    progress: bool = setting(True, "show a progress bar on a terminal")
    tensorboard_dir: str = setting("", "folder of TensorBoard's events; empty: none", is_path=True)
    tensorboard_tags: str = setting(
        "own", "what its curves are called: own names, or those of SMP v2", choices=("own", "smp")
    )
    average_interval: int = setting(
        0, "steps between lines with the mean speed of all since step 30; 0: none", least=0
    )
    use_wandb: bool = setting(False, "log to Weights & Biases (by WANDB_MODE and WANDB_API_KEY)")
    wandb_project: str = setting("sqshforge", "its project")
    wandb_dir: str = setting("", "folder of its files; empty: save_ckpt_path", is_path=True)
    wandb_run_id: str = setting("", "the run to continue; empty: one of save_ckpt_path's own")
    use_profiler: bool = setting(False, "trace steps 4 to 6 into save_ckpt_path/profile_traces")
    use_nsight: bool = setting(
        False, "name steps and their parts for nsys, which records from step 4 on"
    )
    track_memory: bool = setting(
        False, "log the memory of host and GPU in the first step, at evaluations and at saves"
    )
    clean_cache: bool = setting(False, "give a GPU's unused memory back before every step")
    compile_only: bool = setting(
        False, "take a few steps, whatever they give, and save nothing: a pass to compile graphs"
    )
    on_nan: str = setting(
        "stop",
        "what to do about a loss or gradient that is not a number",
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
        """The folders to search for a checkpoint to resume from, in this order."""
        return [folder for folder in (self.save_ckpt_path, self.load_ckpt_path) if folder]
