"""SageMaker's model parallel library, version 2 (torch.sagemaker), as a backend.

The library shards by FSDP1, which it has modified; tensor groups share the work of its own layers
(smp_transform). The model is transformers' class with our sizes. The code calls the library's
documented interface (init, transform, DelayedParamIniter, clip_grad_norm_), and torch's wrappers
for recomputed and offloaded activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from training.config.config import Config
from training.errors import RequestError
from training.parallel.backend import Backend
from training.parallel.optimizer import make_optimizer
from training.parallel.sagemaker import limits, wrap
from training.process_group import Group, start

if TYPE_CHECKING:
    from training.convert.source import Source


class SageMaker(Backend):
    """The library's backend; the parameters of each tensor rank have names of their own."""

    def start(self, config: Config) -> Group:
        tsm = library()
        run = config.run
        ranks = config.parallel.tensor_parallel
        group = start(run.device, ranks, hang_abort_seconds=run.hang_abort_seconds)
        tsm.init(settings(config))
        return group

    def check(self, config: Config, group: Group) -> None:
        limits.check(config, group)

    def build(self, config: Config, group: Group, weights: Source | None) -> nn.Module:
        return wrap.build(config, group, weights)

    def optimizer(self, model: nn.Module, config: Config, group: Group) -> torch.optim.Optimizer:
        return make_optimizer(model, config.optim)

    def clip(self, model: nn.Module, optimizer: torch.optim.Optimizer, threshold: float) -> Tensor:
        from torch.sagemaker.grad_norm import clip_grad_norm_

        norm: Tensor = clip_grad_norm_(_sharded(model), threshold)
        return norm  # ()

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        found = super().state(_sharded(model), optimizer)
        mine = _of_tensor_rank()
        return {part: {mine: held} for part, held in found.items()} if mine else found

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        mine = _of_tensor_rank()
        own = {part: state[part][mine] if mine else state[part] for part in ("model", "optimizer")}
        super().restore(_sharded(model), optimizer, own)

    def copier(
        self, config: Config, device: torch.device
    ) -> tuple[Callable[[Any], Any] | None, str]:
        return None, "this is FSDP1"


def library() -> Any:
    """Import torch.sagemaker. Raises RequestError if it is missing."""
    try:
        import torch.sagemaker as tsm
    except ImportError as error:
        raise RequestError(
            f"backend: smp needs the library torch.sagemaker, which is not here ({error}); fix: "
            "use fsdp"
        ) from error
    return tsm


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that the library is started with, by its own names."""
    parallel = config.parallel
    found: dict[str, Any] = {
        "tensor_parallel_degree": parallel.tensor_parallel,
        "sm_activation_offloading": parallel.offload_activations,
        "activation_loading_horizon": parallel.activation_loading_horizon,
        "random_seed": config.run.seed,
    }
    if parallel.shard_group_size:
        found["hybrid_shard_degree"] = parallel.shard_group_size // parallel.tensor_parallel
    return found


def _sharded(model: nn.Module) -> nn.Module:
    assert isinstance(model, wrap.Trained)
    return model.sharded


def _of_tensor_rank() -> str:
    """Name this rank's part of the layers; empty if each rank has whole ones."""
    state = library().state
    return f"tensor_rank_{state.tp_rank}" if state.tp_size > 1 else ""


BACKEND = SageMaker()
"""The backend that the library provides."""
