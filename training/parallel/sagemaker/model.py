"""A transformers model with our sizes: empty, with random values, or with given ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from training.convert import hf
from training.convert.names import layout
from training.convert.source import Source
from training.errors import RequestError
from training.models import Sizes


def make(sizes: Sizes, *, empty: bool) -> nn.Module:
    """Make a family's class, with float32 parameters; if empty, they are on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**hf.write(sizes), "use_cache": False}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with _empty() if empty else nullcontext():
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def fill(model: nn.Module, weights: Source) -> None:
    """Copy weights into a model. Raises RequestError for a parameter that the model lacks."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for stored in layout("hf", weights.sizes, weights.parameters):
            if stored.name not in parameters:
                raise RequestError(f"init_weights: this transformers has no {stored.name}")
            whole = weights.read(stored.parameter)  # the parameter's shape
            part = whole if stored.part is None else whole[stored.part]  # the tensor's shape
            parameters[stored.name].copy_(part)


@contextmanager
def _empty() -> Iterator[None]:
    """Create parameters on the meta device, but not buffers, which nothing fills later."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
