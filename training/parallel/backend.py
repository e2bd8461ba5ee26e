"""What the loop asks of a way to spread a run over its ranks; one file a way.

The defaults are what those ways have in common whose models torch's own state dicts know.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from training import compat
from training.config.config import Config
from training.process_group import Group

if TYPE_CHECKING:  # it takes safetensors, which a run from random values does not
    from training.convert.source import Source

_MODULES = {
    "fsdp": "training.parallel.fsdp",
    "neuron": "training.parallel.neuron.backend",
    "smp": "training.parallel.sagemaker",
}
"""Name of a way, as the setting `backend` has it -> the module whose `BACKEND` it is."""


class Backend:
    """One way; has no state of its own. All but `mark` are collective calls."""

    def start(self, config: Config) -> Group:
        """Join the other ranks. Raises RequestError where they cannot be had."""
        raise NotImplementedError

    def check(self, config: Config, group: Group) -> None:
        """Raise RequestError with all faults that need torch, the ranks or the device."""
        raise NotImplementedError

    def build(self, config: Config, group: Group, weights: Source | None) -> nn.Module:
        """Make the model, its values random ones of the seed or those of `weights`, and spread it.

        Called as a LanguageModel is. Gradients are to be means over the ranks that read data.
        """
        raise NotImplementedError

    def optimizer(self, model: nn.Module, config: Config, group: Group) -> torch.optim.Optimizer:
        raise NotImplementedError

    def clip(self, model: nn.Module, optimizer: torch.optim.Optimizer, threshold: float) -> Tensor:
        """Scale all gradients so that their global norm is at most `threshold`; it before, ()."""
        raise NotImplementedError

    def mark(self, group: Group) -> None:
        """Is called when a batch has gone back through the model, and when a step is taken."""

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Collect {"model", "optimizer"} by parameter name, a tied parameter once.

        The tensors are the living ones, or stand for them in `restore`. The optimizer's settings
        are not among it: those that a run is started with count.
        """
        weights, moments = get_state_dict(model, optimizer)
        for second in _tied(model):
            del weights[second]
        del moments["param_groups"]
        return {"model": weights, "optimizer": moments}

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Put a state, as `state` gave it and a checkpoint has filled it, into what it is of."""
        groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
        for second, first in _tied(model).items():
            state["model"][second] = state["model"][first]
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict={**state["optimizer"], "param_groups": groups},
        )

    def copier(
        self, config: Config, device: torch.device
    ) -> tuple[Callable[[Any], Any] | None, str]:
        """Give what copies a state into the host's memory; or None, and why it cannot be."""
        found = compat.host_copier(device)
        return found, "" if found else f"torch {torch.__version__} cannot copy a state"


def find_backend(name: str) -> Backend:
    """Give the way that the setting `backend` names."""
    backend: Backend = import_module(_MODULES[name]).BACKEND
    return backend


def _tied(model: nn.Module) -> dict[str, str]:
    return getattr(model, "tied", {})
