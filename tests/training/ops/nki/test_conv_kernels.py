"""The convolution's kernels against the torch operation in float64, on NKI or the model of it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch import Tensor

from training.ops.conv import causal_conv1d


@pytest.fixture
def operations(namespace: str) -> ModuleType:
    return import_module("training.ops.nki.torch_ops")


def conv_inputs(b: int, length: int, d: int, k: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, generator=random, dtype=torch.float64).requires_grad_()
        for shape in ((b, length, d), (d, 1, k), (d,))
    ]


def with_gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [y, *torch.autograd.grad((y * weight.to(y.dtype)).sum(), inputs)]


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize(
    ("b", "length", "d", "k"),
    [(2, 1, 128, 4), (2, 130, 256, 4), (1, 1100, 128, 4), (1, 7, 128, 1), (1, 513, 128, 3)],
)
@pytest.mark.parametrize("biased", [True, False])
def test_outputs_and_gradients_are_those_of_torch(
    operations: ModuleType, b: int, length: int, d: int, k: int, silu: bool, biased: bool
) -> None:
    """Any length, shorter than a tile or in several tiles; SiLU's slope includes the bias."""
    inputs = conv_inputs(b, length, d, k)[: 3 if biased else 2]
    narrow = [one.detach().float().requires_grad_() for one in inputs]
    wide_bias, narrow_bias = (inputs[2], narrow[2]) if biased else (None, None)
    wanted = causal_conv1d(inputs[0], inputs[1], wide_bias, silu)
    found = operations.causal_conv1d(narrow[0], narrow[1], narrow_bias, silu)
    pairs = zip(with_gradients(found, narrow), with_gradients(wanted, inputs), strict=True)
    for name, (one, other) in zip(("y", "x", "weight", "bias"), pairs, strict=False):
        assert one.shape == other.shape
        error = (one.double() - other).abs().max() / other.abs().max()
        assert error < 1e-4, f"{name}: {error}"
