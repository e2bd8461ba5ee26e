"""The interface of a backend, which spreads a run over its ranks; one module each.

The defaults suit the backends whose models work with torch's own state dicts.
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
"""Value of the setting `backend` -> the module whose `BACKEND` implements it."""


class Backend:
    """One backend; has no state of its own. All methods except `mark` are collective calls."""

    def start(self, config: Config) -> Group:
        """Join the other ranks. Raises RequestError if they are unavailable."""
        raise NotImplementedError

    def check(self, config: Config, group: Group) -> None:
        """Raise RequestError with all faults that need torch, the ranks or the device to find."""
        raise NotImplementedError

    def build(self, config: Config, group: Group, weights: Source | None) -> nn.Module:
        """Make the model, with random values from the seed or those of `weights`, and spread it.

        It is called as a LanguageModel is. Gradients must be means over the ranks that read data.
        """
        raise NotImplementedError

    def optimizer(self, model: nn.Module, config: Config, group: Group) -> torch.optim.Optimizer:
        raise NotImplementedError

    def clip(self, model: nn.Module, optimizer: torch.optim.Optimizer, threshold: float) -> Tensor:
        """Scale all gradients to a global norm of at most `threshold`; return that before, ()."""
        raise NotImplementedError

    def mark(self, group: Group) -> None:
        """React to the end of a batch's backward pass, and to that of a step; does nothing here."""

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Collect {"model", "optimizer"} by parameter name, a tied parameter once.

        The tensors are the live ones, or stand-ins that `restore` copies back. The optimizer's
        settings are left out: those that a run is started with apply.
        """
        weights, moments = get_state_dict(model, optimizer)
        for second in _tied(model):
            del weights[second]
        del moments["param_groups"]
        return {"model": weights, "optimizer": moments}

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Put a state, returned by `state` and filled by a checkpoint, into model and optimizer."""
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
        """Return a function that copies a state into host memory; or None, and the reason."""
        found = compat.host_copier(device)
        return found, "" if found else f"torch {torch.__version__} cannot copy a state"


def find_backend(name: str) -> Backend:
    """Return the backend that the setting `backend` names."""
    backend: Backend = import_module(_MODULES[name]).BACKEND
    return backend


def _tied(model: nn.Module) -> dict[str, str]:
    return getattr(model, "tied", {})
