"""Stands in for torch.sagemaker.delayed_param: see the folder above."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.sagemaker import CALLS


class DelayedParamIniter:
    """Gives parameters on the meta device their initial values when FSDP reaches them."""

    def __init__(
        self,
        model: nn.Module,
        init_method_using_config: Callable[[nn.Module], None] | None = None,
        verbose: bool = False,
    ) -> None:
        assert all(one.is_meta for one in model.parameters())
        self._wanted = sum(1 for _ in model.parameters())
        self._made = 0
        CALLS.append({"call": "DelayedParamIniter"})

    def get_param_init_fn(self) -> Callable[[nn.Module], None]:
        return self._make

    def get_post_param_init_fn(self) -> Callable[[nn.Module], None]:
        return lambda module: None

    @contextmanager
    def validate_params_and_buffers_inited(self, enabled: bool = True) -> Iterator[None]:
        yield
        assert self._made == self._wanted or not enabled

    def _make(self, module: nn.Module) -> None:
        for name, one in list(module.named_parameters(recurse=False)):
            value = torch.ones(one.shape) if one.ndim == 1 else torch.randn(one.shape) * 0.02
            module.register_parameter(name, nn.Parameter(value))
            self._made += 1
