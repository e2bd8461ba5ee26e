"""Checks for every family of models: equal to transformers, and consistent with itself.

The models of these tests have a vocabulary of 61.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.models import Sizes, build
from training.models.language import LanguageModel

HYBRIDS = ("bamba-tiny", "granitemoehybrid-tiny", "nemotron_h-tiny")
"""The presets of models that mix layers of different kinds."""
PRESETS = ("mamba-tiny", "mamba2-tiny", "llama-tiny", "mixtral-tiny", *HYBRIDS)
"""One preset of every kind."""


def filled(sizes: Sizes, seed: int = 1) -> LanguageModel:
    """Make a model with its initial values."""
    model = build(sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial(name, parameter.shape, seed))
    return model


def randomised(reference: Any) -> Any:
    """Give a reference values that make every part matter, norms and biases too."""
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            around = float("norm" in name and name.endswith("weight"))
            parameter.copy_(around + 0.15 * torch.randn(parameter.shape, generator=random))
    return reference.eval()


def padding(kind: str, length: int) -> Tensor | None:
    """Make the mask of three texts of different lengths."""
    mask = torch.ones(3, length, dtype=torch.bool)
    if kind == "right":
        mask[1, length - 3 :] = mask[2, 1:] = False
    elif kind == "left":
        mask[1, :3] = mask[2, : length - 1] = False
    return mask if kind else None


def compare(
    model: LanguageModel,
    reference: Any,
    named: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda theirs: theirs,
    length: int = 17,
    kind: str = "",
    balance: float = 0.0,
    within: float = 1e-3,
) -> None:
    """Compare a model with its reference: the same weights, then logits, loss and every gradient.

    `named` maps the reference's tensors to our names; `balance` is what it adds to its loss; a
    gradient may differ by `within` of its norm.
    """
    model.load_state_dict(dict(named(reference.state_dict())))
    tokens = torch.randint(61, (3, length), generator=torch.Generator().manual_seed(length))
    mask = padding(kind, length)
    real = torch.ones(3, length, dtype=torch.bool) if mask is None else mask
    theirs = reference(tokens, attention_mask=None if mask is None else mask.long())
    ours = model(tokens, mask=mask)
    assert (ours - theirs.logits)[real].abs().max() <= 1e-4

    targets = tokens.roll(-1, 1).masked_fill(~(real & real.roll(-1, 1)), -100)
    targets[:, -1] = -100
    expected = F.cross_entropy(theirs.logits.flatten(0, 1), targets.flatten())
    if balance:
        expected = expected + balance * theirs.aux_loss
    expected.backward()
    loss = model(tokens, targets, mask)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    wanted = named({name: one for name, one in gradients.items() if one is not None})
    found: dict[str, Any] = {name: one.grad for name, one in model.named_parameters()}
    assert found.keys() == wanted.keys()
    # Where only one key or one expert is visible, its weight is always 1, so gradients are just
    # rounding.
    nothing = 1e-6 * torch.stack([one.norm() for one in wanted.values()]).norm()
    for name, gradient in wanted.items():
        if gradient.norm() <= nothing:
            assert found[name].norm() <= nothing, name
        else:
            assert (found[name] - gradient).norm() <= within * gradient.norm(), name


def like(config: Sizes, **changes: Any) -> Any:
    return type(config)(**{**vars(config), **changes})


def advances_like_forward(model: LanguageModel, split: tuple[int, ...]) -> None:
    """Check that generation in these pieces gives the same logits as seeing all at once."""
    model.eval()
    tokens = torch.randint(61, (2, sum(split)), generator=torch.Generator().manual_seed(1))
    whole = model(tokens)
    states, at = model.start(2, sum(split)), 0
    for size in split:
        logits = model.advance(tokens[:, at : at + size], states)
        at += size
        torch.testing.assert_close(logits, whole[:, at - 1], rtol=1e-4, atol=1e-5)


def recomputation_changes_nothing(sizes: Sizes) -> None:
    """Check that recomputation keeps gradients the same bit for bit, dropout included."""
    tokens = torch.randint(61, (2, 30), generator=torch.Generator().manual_seed(1))
    gradients = []
    for recompute in (False, True):
        model = filled(sizes)
        for block in model.blocks:
            block.recompute = recompute
        torch.manual_seed(4)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again, rtol=0, atol=0)


class Wrapped(nn.Module):
    """What FSDP1 puts in place of each block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: Any) -> Any:
        return self.block(*inputs)


def wrapping_skips_no_block(sizes: Sizes, layers: str) -> None:
    """Check that the loss is the same if each block is wrapped in another module."""
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    model = filled(sizes)
    expected = model(tokens, tokens)
    within: Any = model.get_submodule(layers)
    for index, block in enumerate(list(within)):
        within[index] = Wrapped(block)
    assert len(model.blocks) == sizes.n_layer
    torch.testing.assert_close(model(tokens, tokens), expected, rtol=0, atol=0)
