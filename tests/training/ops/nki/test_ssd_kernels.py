"""The SSD kernels against the torch operation in float64, on NKI or the model of it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.ops.test_ssd import ssd_inputs
from tests.training.support.documents import numbers
from training.ops.documents import Documents
from training.ops.ssd import ssd

NAMES = ("y", "x", "dt", "A", "B", "C", "D", "dt_bias")
LIKE_TORCH = 1e-4


@pytest.fixture
def operations(namespace: str) -> ModuleType:
    return import_module("training.ops.nki.torch_ops")


def with_gradients(y: Tensor, inputs: dict[str, Tensor]) -> list[Tensor]:
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [y, *torch.autograd.grad((y * weight.to(y.dtype)).sum(), list(inputs.values()))]


def assert_like_torch(operations: ModuleType, inputs: dict[str, Any]) -> None:
    """Compare y and all gradients, each relative to the largest number in torch's."""
    narrow = {name: value.detach().float().requires_grad_() for name, value in inputs.items()}
    bias = narrow.get("dt_bias")
    found = operations.ssd(*[narrow[name] for name in ("x", "dt", "A", "B", "C", "D")], bias, 64)
    wanted = ssd(**inputs, chunk=64)
    pairs = zip(with_gradients(found, narrow), with_gradients(wanted, inputs), strict=True)
    for name, (one, other) in zip(NAMES, pairs, strict=False):
        assert one.shape == other.shape
        error = (one.double() - other).abs().max() / other.abs().max()
        assert error < LIKE_TORCH, f"{name}: {error}"


@pytest.mark.parametrize(
    ("b", "length", "heads", "p", "groups"),
    [(2, 128, 4, 64, 2), (1, 512, 2, 128, 1), (1, 256, 3, 32, 3)],
)
def test_outputs_and_gradients_are_those_of_torch(
    operations: ModuleType, b: int, length: int, heads: int, p: int, groups: int
) -> None:
    inputs = ssd_inputs(b, length, heads, p, groups, 128)
    assert_like_torch(operations, inputs)


def test_states_last_over_chunks(operations: ModuleType) -> None:
    """With decays near 1, most of y and of the gradients passes through the states."""
    inputs = ssd_inputs(1, 384, 4, 32, 2, 128)
    with torch.no_grad():
        inputs["A"].mul_(0.01)
        inputs["dt"].sub_(3.0)
    assert_like_torch(operations, inputs)


def test_there_need_be_no_bias_of_the_steps(operations: ModuleType) -> None:
    inputs = ssd_inputs(1, 128, 1, 16, 1, 128)
    del inputs["dt_bias"]
    assert_like_torch(operations, inputs)


def test_small_steps_after_a_large_one_keep_their_digits(operations: ModuleType) -> None:
    """A step of e^-10000 clears the state; differences of float32 sums would lose the next ones."""
    inputs = ssd_inputs(1, 256, 2, 16, 1, 128)
    with torch.no_grad():
        inputs["dt"][:, 10] = 1e4
        inputs["dt"][:, 11:] = -3.0
        inputs["A"].fill_(-1.0)
        inputs["x"][:, :11] = 0
    assert_like_torch(operations, inputs)


@pytest.mark.parametrize("decay", [-1e-3, -1e3])
@pytest.mark.parametrize("dt", [-1e3, 1e3])
def test_extreme_steps_give_numbers(operations: ModuleType, dt: float, decay: float) -> None:
    inputs = ssd_inputs(1, 256, 2, 16, 1, 128, dtype=torch.float32)
    with torch.no_grad():
        inputs["dt"].fill_(dt)
        inputs["A"].fill_(decay)
    y = operations.ssd(*inputs.values(), 128)
    assert all(value.isfinite().all() for value in with_gradients(y, inputs))


def test_bfloat16_comes_and_goes_and_float32_computes(operations: ModuleType) -> None:
    inputs = ssd_inputs(1, 128, 2, 16, 1, 128, dtype=torch.bfloat16)
    y = operations.ssd(*inputs.values(), 128)
    wide = {name: value.detach().float() for name, value in inputs.items()}
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, operations.ssd(*wide.values(), 128).bfloat16())
    gradients = torch.autograd.grad(y.sum(), list(inputs.values()))
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients)


def test_where_documents_begin_nothing_is_left_of_the_state(operations: ModuleType) -> None:
    """With decays near 1, and one near 0, each document gives the same as in torch."""
    inputs = ssd_inputs(2, 256, 4, 32, 2, 128)
    with torch.no_grad():
        inputs["A"].mul_(torch.tensor([0.001, 0.01, 1.0, 20.0]))
    lengths = [[1, 100, 27, 127, 1], [256]]
    documents = Documents(numbers(lengths))
    narrow = {name: value.detach().float().requires_grad_() for name, value in inputs.items()}
    parts = [narrow[name] for name in ("x", "dt", "A", "B", "C", "D", "dt_bias")]
    found = operations.ssd(*parts, 64, documents=documents)
    wanted = ssd(**inputs, chunk=64, documents=documents)
    pairs = zip(with_gradients(found, narrow), with_gradients(wanted, inputs), strict=True)
    for name, (one, other) in zip(NAMES, pairs, strict=True):
        error = (one.double() - other).abs().max() / other.abs().max()
        assert error < LIKE_TORCH, f"{name}: {error}"
