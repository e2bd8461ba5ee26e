"""The operations against what they compute, written down naively."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from training.ops import loss as loss_module
from training.ops import scan
from training.ops.conv import causal_conv1d
from training.ops.loss import next_token_cross_entropy
from training.ops.norm import RMSNorm


def scan_inputs(b: int, l: int, d: int, n: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:  # noqa: E741
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=dtype)

    delta = F.softplus(normal(b, l, d))
    A = -torch.exp(normal(d, n))  # noqa: N806
    inputs = [normal(b, l, d), delta, A, normal(b, l, n), normal(b, l, n), normal(d)]
    return [value.requires_grad_() for value in inputs]


def recurrence(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:  # noqa: N803
    """The definition: one step after the other."""
    h = x.new_zeros(x.shape[0], *A.shape)
    ys = []
    for t in range(x.shape[1]):
        decay = torch.exp(delta[:, t, :, None] * A)
        h = decay * h + (delta[:, t] * x[:, t])[..., None] * B[:, t, None, :]
        ys.append((h * C[:, t, None, :]).sum(-1) + D * x[:, t])
    return torch.stack(ys, dim=1)


@pytest.mark.parametrize("cut", [(32, 8), (256, 16), (6, 2), (7, 3), (1, 1)])
@pytest.mark.parametrize("length", [1, 7, 8, 33, 100])
def test_scan_equals_the_recurrence(monkeypatch: pytest.MonkeyPatch, cut: Any, length: int) -> None:
    monkeypatch.setitem(scan.CUT, "cpu", cut)
    inputs = scan_inputs(2, length, 3, 4, torch.float64)
    weight = torch.randn(2, length, 3, dtype=torch.float64)
    y, expected = scan.selective_scan(*inputs), recurrence(*inputs)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    found = torch.autograd.grad((y * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    for gradient, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-9, atol=1e-9)


def test_scan_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scan.CUT, "cpu", (6, 2))
    assert torch.autograd.gradcheck(scan.selective_scan, scan_inputs(1, 15, 2, 3, torch.float64))


def test_scan_in_float32_is_close_to_float64() -> None:
    inputs = scan_inputs(1, 300, 8, 16, torch.float64)
    exact = recurrence(*inputs)
    y = scan.selective_scan(*(value.float() for value in inputs))
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-4)


def test_scan_in_bfloat16_computes_in_float32() -> None:
    inputs = [value.detach().bfloat16() for value in scan_inputs(1, 64, 8, 16, torch.float32)]
    y = scan.selective_scan(*inputs)
    assert y.dtype == torch.bfloat16
    exact = scan.selective_scan(*(value.float() for value in inputs))
    torch.testing.assert_close(y, exact.bfloat16(), rtol=0, atol=0)


def test_scan_survives_extreme_steps() -> None:
    """Cumulative decays of e^-100000 and of 1: no overflow, no NaN, also in the gradients."""
    for size in (0.0, 1e3):
        inputs = scan_inputs(1, 100, 4, 4, torch.float32)
        inputs[1] = torch.full_like(inputs[1], size).requires_grad_()
        y = scan.selective_scan(*inputs)
        gradients = torch.autograd.grad(y.sum(), inputs)
        assert all(value.isfinite().all() for value in (y, *gradients))


def test_scan_keeps_little_for_the_backward_pass() -> None:
    """Kept per position: a few times d and n, not d times n."""
    b, l, d, n = 1, 512, 32, 16  # noqa: E741
    kept = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        scan.selective_scan(*scan_inputs(b, l, d, n, torch.float32))
    assert sum(kept) < b * l * d * n / 2


@pytest.mark.parametrize("length", [1, 3, 10])
def test_conv_equals_torch(length: int) -> None:
    d, taps = 5, 4
    conv = torch.nn.Conv1d(d, d, taps, groups=d, padding=taps - 1, dtype=torch.float64)
    x = torch.randn(2, length, d, dtype=torch.float64)
    expected = conv(x.transpose(1, 2))[..., :length].transpose(1, 2)
    torch.testing.assert_close(causal_conv1d(x, conv.weight, conv.bias), expected)
    without = causal_conv1d(x, conv.weight, None)
    torch.testing.assert_close(without, expected - conv.bias)


def test_conv_gradcheck() -> None:
    shapes = ((1, 6, 3), (3, 1, 4), (3,))
    inputs = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(causal_conv1d, inputs)


def test_norm_is_float32_inside() -> None:
    norm = RMSNorm(64, eps=1e-5).bfloat16()
    x = torch.randn(2, 3, 64) * 300
    expected = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    y = norm(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected.bfloat16())


@pytest.mark.parametrize("logits", [1, 50, 10**9])
def test_loss_equals_cross_entropy(monkeypatch: pytest.MonkeyPatch, logits: Any) -> None:
    monkeypatch.setattr(loss_module, "LOGITS", logits)
    hidden = torch.randn(2, 13, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (2, 13))
    found = next_token_cross_entropy(hidden, weight, targets)
    expected = F.cross_entropy((hidden @ weight.t()).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad(3 * found, (hidden, weight))
    wanted = torch.autograd.grad(3 * expected, (hidden, weight))
    for gradient, reference in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, reference)


def test_loss_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "LOGITS", 4000)
    seen: list[int] = []
    softmax = F.log_softmax

    def counted(x: Tensor, dim: int) -> Tensor:
        seen.append(x.numel())
        return softmax(x, dim=dim)

    monkeypatch.setattr(F, "log_softmax", counted)
    hidden, weight = torch.randn(1, 100, 4, requires_grad=True), torch.randn(1000, 4)
    loss = next_token_cross_entropy(hidden, weight, torch.zeros(1, 100, dtype=torch.long))
    assert len(seen) == 25 and max(seen) == 4000
    assert math.isfinite(loss.item())
