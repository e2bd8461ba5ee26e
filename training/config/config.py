"""The complete description of a run: frozen dataclasses, checked together.

The checks find settings that do not go together, or that nothing uses. The entry points turn their
flags into a Config; nothing below them reads a flag. No torch here, so that an impossible request
is refused before any rank starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from training.config import degrees
from training.config.sections import (
    STREAM,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
)
from training.config.setting import faults as own_faults
from training.errors import RequestError
from training.models import Sizes

__all__ = [
    "FSDP_ONLY",
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RunConfig",
]


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run. Raises RequestError with all its faults when it is made."""

    model: ModelConfig
    data: DataConfig
    run: RunConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        found = config_faults(self.model, self.data, self.run, self.optim, self.parallel)
        if found:
            raise RequestError.of(found)


def config_faults(
    model: ModelConfig,
    data: DataConfig,
    run: RunConfig,
    optim: OptimConfig,
    parallel: ParallelConfig,
) -> list[str]:
    """List what is wrong with a configuration; each fault names its setting."""
    found = [fault for section in (data, optim, parallel, run) for fault in own_faults(section)]
    found += [
        f"{name}: must be less than 1, but is {value}"
        for name, value in (("beta1", optim.beta1), ("beta2", optim.beta2))
        if value >= 1
    ]
    if run.eval_interval and not data.eval_dataset_path:
        found.append("eval_interval: there is no eval_dataset_path to evaluate on")
    if run.tensorboard_tags != "own" and not run.tensorboard_dir:
        found.append("tensorboard_tags: has no effect without tensorboard_dir")
    unset = RunConfig()
    found += [
        f"{name}: has no effect without use_wandb"
        for name in ("wandb_project", "wandb_dir", "wandb_run_id")
        if not run.use_wandb and getattr(run, name) != getattr(unset, name)
    ]
    if run.hang_seconds and 0 < run.hang_abort_seconds <= run.hang_seconds:
        found.append("hang_abort_seconds: must be more than hang_seconds, or 0 for never")
    found += _data_faults(data)
    if data.document_end >= model.sizes.vocab_size:
        found.append(
            f"document_end: {data.document_end:,} is beyond the vocabulary of {model.name}, which "
            f"has {model.sizes.vocab_size:,} ids, so it would end nothing; fix: give the id that "
            "ends a document"
        )
    if parallel.shard_group_size and parallel.sharding_strategy != "hsdp":
        found.append("shard_group_size: only sharding_strategy=hsdp has shard groups")
    if parallel.sharding_strategy == "ddp" and not parallel.reshard_after_forward:
        found.append("reshard_after_forward: with sharding_strategy=ddp nothing is gathered")
    found += _backend_faults(model.sizes, run, parallel)
    if parallel.backend == "fsdp":
        found += degrees.context_faults(
            model.sizes,
            parallel.context_parallel,
            data.seq_length,
            compiled=parallel.use_torch_compile,
        )
    found += _memory_faults(parallel)
    return found


FSDP_ONLY = (
    *("sharding_strategy", "shard_group_size", "fsdp_engine", "limit_all_gathers", "low_cpu_fsdp"),
    *("reduce_precision", "offload_activations", "cpu_offload", "use_torch_compile"),
    *("reshard_after_forward", "forward_prefetch", "backward_prefetch", "fp8"),
    "context_parallel",
)
NEURON_ONLY = ("zero1", "master_weights")
SMP_ONLY = ("smp_transform", "fp8_amax_history_len", "fp8_amax_compute_algo")
_UNHEEDED = {
    "fsdp": (*NEURON_ONLY, *SMP_ONLY),
    "neuron": (*FSDP_ONLY, *SMP_ONLY),
    "smp": (*NEURON_ONLY, "context_parallel"),  # what else it ignores is in its own flags
}
"""Backend -> the settings that it ignores."""


def _backend_faults(sizes: Sizes, run: RunConfig, parallel: ParallelConfig) -> list[str]:
    """List the settings that the backend would ignore, and why it cannot spread the model."""
    found = [
        f"{name}: backend={parallel.backend} ignores it; fix: leave it out"
        for name in _UNHEEDED[parallel.backend]
        if getattr(parallel, name) != getattr(ParallelConfig, name)
    ]
    if parallel.backend == "neuron":
        if not parallel.master_weights and parallel.precision != "bf16":
            found.append("master_weights: False has no effect without precision=bf16")
        return [*found, *degrees.neuron_faults(sizes, parallel.tensor_parallel)]
    if run.device == "xla":
        found.append("device: xla needs backend=neuron")
    if parallel.backend == "smp":
        return found  # its library shares layers in its own way
    degree = parallel.tensor_parallel
    return found + degrees.faults(sizes, degree, parallel.fsdp_engine, parallel.use_torch_compile)


STREAM_ONLY = (
    "dataset_config",
    "tokenizer",
    "shuffle_buffer",
    "stream_retries",
)


def _data_faults(data: DataConfig) -> list[str]:
    """List settings that would be ignored for this data, or do not go together."""
    found = []
    paths = (data.dataset_path, data.eval_dataset_path)
    if not any(path.startswith(STREAM) for path in paths):
        found += [
            f"{name}: only a stream uses it (dataset_path=stream:...)"
            for name in STREAM_ONLY
            if getattr(data, name) != getattr(DataConfig, name)
        ]
    others = ("text:", "packed:", "packed-", "synthetic:", STREAM)
    if data.document_end >= 0 and all(path.startswith(others) for path in paths if path):
        found.append(
            "document_end: only a set on disk or lines uses it; other data knows its documents"
        )
    elif data.document_end >= 0 and data.reset_documents is False:
        found.append(
            "document_end: reset_documents=False ignores it; fix: leave one of the two out"
        )
    if data.num_workers and not data.prefetch:
        found.append("prefetch: num_workers read ahead, so it must be at least 1 with them")
    if data.eval_batch_size and not data.eval_dataset_path:
        found.append("eval_batch_size: there is no eval_dataset_path to evaluate on")
    return found


def _memory_faults(parallel: ParallelConfig) -> list[str]:
    """List settings of memory savings that are off, or do not go together."""
    found = []
    if not parallel.fsdp_activation_checkpointing:
        found += [
            f"{name}: only fsdp_activation_checkpointing=True recomputes blocks"
            for name in ("selective_checkpointing", "checkpointing_policy")
            if getattr(parallel, name) != getattr(ParallelConfig, name)
        ]
    elif parallel.checkpointing_policy == "selective" and parallel.use_torch_compile:
        found.append(
            "checkpointing_policy: selective sees no operation of compiled blocks; fix: use full, "
            "or leave out use_torch_compile"
        )
    horizon = parallel.activation_loading_horizon
    if horizon != ParallelConfig.activation_loading_horizon and not parallel.offload_activations:
        found.append("activation_loading_horizon: only offload_activations=True loads activations")
    return found
