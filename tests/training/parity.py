"""Our models beside the same in transformers: equal logits, equal gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from training.models.language import LanguageModel

LOGITS = 1e-4  # largest difference
GRADIENTS = 1e-3  # norm of the difference / norm

Names = Callable[[str], str]


def filled(model: LanguageModel, seed: int = 1) -> LanguageModel:
    """Give the model first values that leave nothing at a value that could hide a fault."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = model.initial(name, parameter.shape, seed)
            noise = torch.randn(parameter.shape, generator=random)
            parameter.copy_(value + 0.02 * noise)
    return model


def compare(ours: LanguageModel, theirs: Any, tokens: Tensor, mask: Tensor | None = None) -> None:
    """Assert equal logits and gradients where there is no padding, tokens (b, l)."""
    reference = theirs(input_ids=tokens, attention_mask=None if mask is None else mask.long())
    wanted = reference.logits
    found = ours(tokens, mask=mask)
    shown = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    assert (found - wanted)[shown].abs().max() <= LOGITS
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0))
    weight = weight * shown[..., None]
    mine = _gradients(ours, (found * weight).sum())
    other = _gradients(theirs, (wanted * weight).sum())
    assert mine.keys() == other.keys()
    for name, gradient in mine.items():
        difference = (gradient - other[name]).norm() / other[name].norm().clamp(min=1e-8)
        assert difference <= GRADIENTS, f"{name}: {difference:.2e}"


def _gradients(model: Any, loss: Tensor) -> Mapping[str, Tensor]:
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
