"""The model under torch.sagemaker: transformers' class, transformed, filled and sharded."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from training.config.config import Config, ParallelConfig
from training.ops.loss import IGNORED, counted
from training.parallel.fsdp1 import BACKWARD, STRATEGIES, reduce_dtype
from training.parallel.memory import compute_dtype
from training.parallel.sagemaker import limits
from training.parallel.sagemaker.model import fill, make
from training.process_group import Group

if TYPE_CHECKING:
    from training.convert.source import Source

log = logging.getLogger("training.parallel.sagemaker")


class Trained(nn.Module):
    """A transformers model, called as a LanguageModel is.

    Such a model shifts labels itself, so the last target of a sequence has no prediction: the mean
    over the others stands in for it.
    """

    def __init__(
        self, inner: nn.Module, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        self.inner, self.context = inner, context

    @property
    def sharded(self) -> nn.Module:
        """The module that FSDP made, which offloading wraps once more."""
        inside: nn.Module = getattr(self.inner, "_checkpoint_wrapped_module", self.inner)
        return inside

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
        total: Tensor | None = None,
        seq_idx: None = None,  # limits.check refuses requests with documents
    ) -> Tensor:
        """Token ids (b, l) and targets (b, l) -> their loss over `total`, ()."""
        labels = torch.full_like(input_ids, IGNORED)  # (b, l)
        labels[:, 1:] = targets[:, :-1]
        kept = (labels != IGNORED).any()  # ()
        count = torch.where(kept, counted(targets, weights), 0)  # ()
        # If nothing counts, the mean would be 0 / 0: let one label count, then multiply by 0.
        labels[0, 1] = torch.where(kept, labels[0, 1], 0)
        with self.context():
            mean = self.inner(input_ids=input_ids, attention_mask=None, labels=labels)["loss"]  # ()
        return mean.float() * count / (count if total is None else total)  # ()


def build(config: Config, group: Group, weights: Source | None) -> nn.Module:
    """Make, transform, fill and shard the model; with `weights` rank 0 alone reads them."""
    from torch.sagemaker import transform
    from torch.sagemaker.delayed_param import DelayedParamIniter

    parallel, sizes = config.parallel, config.model.sizes
    reads = weights is not None and group.rank == 0
    with ExitStack() as made:
        # All ranks draw the same values, since the copies of hybrid sharding must be equal.
        made.enter_context(torch.random.fork_rng())
        torch.manual_seed(config.run.seed)
        model = make(sizes, empty=parallel.low_cpu_fsdp and not reads)
        layers = _layers(model, parallel)
        if weights is not None and reads:
            fill(model, weights)
        if parallel.smp_transform:
            model = transform(model, load_state_dict_from_rank0=weights is not None)
        options: dict[str, Any] = {}
        if parallel.low_cpu_fsdp and not reads:
            initer = DelayedParamIniter(model)
            options["param_init_fn"] = initer.get_param_init_fn()
            if sizes.tie_embeddings:
                options["post_param_init_fn"] = initer.get_post_param_init_fn()
            if weights is None:
                made.enter_context(initer.validate_params_and_buffers_inited())
        model = _shard(model, layers, config, group, sync=weights is not None, **options)
    if parallel.fsdp_activation_checkpointing:
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=wrapper,
            check_fn=lambda one: isinstance(one, tuple(layers)),
        )
    if parallel.offload_activations:
        model = offload_wrapper(model)
    return Trained(model, _context(config, group))


def _shard(
    model: nn.Module, layers: set[type[nn.Module]], config: Config, group: Group, **options: Any
) -> nn.Module:
    parallel = config.parallel
    dtype = compute_dtype(parallel.precision, group.device)
    mixed = None
    if dtype != torch.float32:
        reduced = reduce_dtype(parallel.reduce_precision, dtype)
        # The library's own layers, and transformers' Llama, take float32 buffers.
        mixed = MixedPrecision(param_dtype=dtype, reduce_dtype=reduced, buffer_dtype=torch.float32)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(layers),
        mixed_precision=mixed,
        sharding_strategy=_strategy(parallel),
        backward_prefetch=BACKWARD[parallel.backward_prefetch],
        forward_prefetch=parallel.forward_prefetch,
        limit_all_gathers=parallel.limit_all_gathers,
        device_id=group.device,
        use_orig_params=True,
        sync_module_states=options.pop("sync"),
        **options,
    )


def _strategy(parallel: ParallelConfig) -> ShardingStrategy:
    """Return the strategy asked for; the library makes the groups of hybrid sharding."""
    if parallel.sharding_strategy == "ddp":
        return ShardingStrategy.NO_SHARD
    return STRATEGIES[parallel.sharding_strategy == "hsdp", parallel.reshard_after_forward]


def _layers(model: nn.Module, parallel: ParallelConfig) -> set[type[nn.Module]]:
    """Find the classes of the layers that are sharded and recomputed together."""
    if parallel.smp_transform:
        from torch.sagemaker.tensor_parallel.transformer import TransformerLayer

        return {TransformerLayer}
    names = getattr(model, "_no_split_modules", None) or ()
    return {type(one) for one in model.modules() if type(one).__name__ in names}


def _context(config: Config, group: Group) -> Callable[[], AbstractContextManager[Any]]:
    """Return the context of the model's forward pass: float8 if available; log it if not."""
    parallel = config.parallel
    if not parallel.fp8:
        return nullcontext
    why = limits.fp8_obstacle(config, group.device)
    if why:
        log.info("fp8: off, as %s", why)
        return nullcontext
    import torch.sagemaker as tsm
    from transformer_engine.common.recipe import DelayedScaling, Format
    from transformer_engine.pytorch import fp8_autocast

    recipe = DelayedScaling(
        fp8_format=Format.HYBRID,
        amax_history_len=parallel.fp8_amax_history_len,
        amax_compute_algo=parallel.fp8_amax_compute_algo,
    )
    everyone = tsm.state.world_process_group
    return functools.partial(fp8_autocast, enabled=True, fp8_recipe=recipe, fp8_group=everyone)
