"""The selective scan against its definition, step after step."""

# ruff: noqa: N803, N806  (A, B, C, D are the paper's own names)
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from training.ops import scan
from training.ops.scan import selective_scan, selective_scan_from


def made(
    b: int,
    l: int,  # noqa: E741
    d: int,
    n: int,
    dtype: torch.dtype,
    gated: bool = True,
    seed: int = 0,
) -> list[Tensor]:
    """Make x, dt, A, B, C, D, and if it is gated z and dt_bias."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=dtype)

    A = -torch.exp(normal(d, n))
    inputs = [normal(b, l, d), normal(b, l, d), A, normal(b, l, n), normal(b, l, n), normal(d)]
    inputs += [normal(b, l, d), normal(d)] if gated else []
    return [value.requires_grad_() for value in inputs]


def recurrence(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> Tensor:
    """Compute the definition: one step after the other."""
    delta = F.softplus(dt if dt_bias is None else dt + dt_bias)
    h = x.new_zeros(x.shape[0], *A.shape)
    ys = []
    for t in range(x.shape[1]):
        decay = torch.exp(delta[:, t, :, None] * A)
        h = decay * h + (delta[:, t] * x[:, t])[..., None] * B[:, t, None, :]
        ys.append((h * C[:, t, None, :]).sum(-1) + D * x[:, t])
    y = torch.stack(ys, dim=1)
    return y if z is None else y * F.silu(z)


@pytest.mark.parametrize("cut", [(32, 32), (32, 8), (256, 16), (6, 2), (7, 3), (1, 1)])
@pytest.mark.parametrize("length", [1, 7, 8, 33, 100])
@pytest.mark.parametrize("gated", [True, False])
def test_it_equals_the_recurrence(
    monkeypatch: pytest.MonkeyPatch, cut: Any, length: int, gated: bool
) -> None:
    monkeypatch.setitem(scan.CUT, "cpu", cut)
    inputs = made(2, length, 3, 4, torch.float64, gated)
    weight = torch.randn(2, length, 3, dtype=torch.float64)
    y, expected = selective_scan(*inputs), recurrence(*inputs)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    found = torch.autograd.grad((y * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    for gradient, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("gated", [True, False])
def test_gradcheck(monkeypatch: pytest.MonkeyPatch, gated: bool) -> None:
    monkeypatch.setitem(scan.CUT, "cpu", (6, 2))
    inputs = made(1, 15, 2, 3, torch.float64, gated)
    assert torch.autograd.gradcheck(selective_scan, inputs)


@pytest.mark.parametrize("parts", [[40], [1] * 40, [33, 1, 6]])
def test_it_goes_on_from_a_state(parts: list[int]) -> None:
    inputs = [value.detach() for value in made(2, 40, 3, 4, torch.float64)]
    x, dt, A, B, C, D, z, bias = inputs
    state = torch.zeros(2, 4, 3, dtype=torch.float64)
    ys = []
    for one in zip(*(value.split(parts, dim=1) for value in (x, dt, B, C, z)), strict=True):
        x_, dt_, B_, C_, z_ = one
        ys.append(selective_scan_from(state, x_, dt_, A, B_, C_, D, z_, bias))
    torch.testing.assert_close(torch.cat(ys, dim=1), recurrence(*inputs), rtol=1e-10, atol=1e-10)


def test_float32_is_close_to_float64() -> None:
    inputs = made(1, 300, 8, 16, torch.float64)
    exact = recurrence(*inputs)
    y = selective_scan(*(value.float() for value in inputs))
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-4)


def test_bfloat16_is_computed_in_float32() -> None:
    inputs = [value.detach().bfloat16() for value in made(1, 64, 8, 16, torch.float32)]
    y = selective_scan(*inputs)
    assert y.dtype == torch.bfloat16
    exact = selective_scan(*(value.float() for value in inputs))
    torch.testing.assert_close(y, exact.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("size", [-1e3, 0.0, 1e3])
def test_it_survives_extreme_steps(size: float) -> None:
    """Cumulative decays of e^-100000 and of 1: no overflow, no NaN, also in the gradients."""
    inputs = made(1, 100, 4, 4, torch.float32)
    inputs[1] = torch.full_like(inputs[1], size).requires_grad_()
    y = selective_scan(*inputs)
    gradients = torch.autograd.grad(y.sum(), inputs)
    assert all(value.isfinite().all() for value in (y, *gradients))


def test_little_is_kept_for_the_backward_pass() -> None:
    """Per position, it keeps a few times d and n numbers, not d times n."""
    b, l, d, n = 1, 512, 32, 16  # noqa: E741
    kept = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        selective_scan(*made(b, l, d, n, torch.float32))
    assert sum(kept) < b * l * d * n / 2
