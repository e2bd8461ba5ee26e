"""Convolution, norm and loss against naive versions of them."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from training.ops import loss as loss_module
from training.ops.conv import causal_conv1d, causal_conv1d_step
from training.ops.loss import counted, next_token_cross_entropy
from training.ops.norm import RMSNorm, rms_norm


@pytest.mark.parametrize("length", [1, 3, 10])
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_conv_equals_torch(taps: int, length: int) -> None:
    d = 5
    conv = torch.nn.Conv1d(d, d, taps, groups=d, padding=taps - 1, dtype=torch.float64)
    x = torch.randn(2, length, d, dtype=torch.float64)
    expected = conv(x.transpose(1, 2))[..., :length].transpose(1, 2)
    torch.testing.assert_close(causal_conv1d(x, conv.weight, conv.bias), expected)
    without = causal_conv1d(x, conv.weight, None)
    torch.testing.assert_close(without, expected - conv.bias)
    gated = causal_conv1d(x, conv.weight, conv.bias, silu=True)
    torch.testing.assert_close(gated, F.silu(expected))


@pytest.mark.parametrize("silu", [True, False])
def test_conv_gradcheck(silu: bool) -> None:
    shapes = ((2, 6, 3), (3, 1, 4), (3,))
    inputs = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(lambda x, w, b: causal_conv1d(x, w, b, silu), inputs)
    assert torch.autograd.gradcheck(lambda x, w: causal_conv1d(x, w, None, silu), inputs[:2])


@pytest.mark.parametrize("parts", [[12], [1] * 12, [2, 7, 3]])
def test_conv_goes_on_from_a_state(parts: list[int]) -> None:
    x, weight, bias = (torch.randn(*s) for s in ((2, 12, 3), (3, 1, 4), (3,)))
    state = torch.zeros(2, 3, 3)
    ys = [causal_conv1d_step(part, state, weight, bias, silu=True) for part in x.split(parts, 1)]
    torch.testing.assert_close(torch.cat(ys, 1), causal_conv1d(x, weight, bias, silu=True))
    torch.testing.assert_close(state, x[:, -3:])


def test_norm_is_float32_inside() -> None:
    norm = RMSNorm(64, eps=1e-5).bfloat16()
    x = torch.randn(2, 3, 64) * 300
    expected = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    y = norm(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected.bfloat16())


def test_norm_gradcheck() -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    expected = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-3) * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), expected)
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, 1e-3), (x, weight))


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


def test_loss_leaves_out_what_does_not_count() -> None:
    hidden = torch.randn(2, 13, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (2, 13))
    targets[0, 5:] = -100
    found = next_token_cross_entropy(hidden, weight, targets)
    expected = F.cross_entropy((hidden @ weight.t()).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad(found, (hidden, weight))
    wanted = torch.autograd.grad(expected, (hidden, weight))
    for gradient, reference in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, reference)
    assert not gradients[0][0, 5:].any()
    nothing = next_token_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    assert nothing.item() == 0


def test_loss_of_parts_is_that_of_the_whole() -> None:
    """Weighted, over one total: so uneven micro-batches and ranks add up, too."""
    hidden = torch.randn(4, 13, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (4, 13))
    targets[0, 5:] = -100
    weights = torch.rand(4, 13)
    total = counted(targets, weights)
    each = F.cross_entropy((hidden @ weight.t()).flatten(0, 1), targets.flatten(), reduction="none")
    expected = (each * weights.flatten()).sum() / total
    whole = next_token_cross_entropy(hidden, weight, targets, weights)
    parts = sum(
        next_token_cross_entropy(hidden[cut], weight, targets[cut], weights[cut], total)
        for cut in (slice(0, 1), slice(1, 4))
    )
    wanted = torch.autograd.grad(expected, (hidden, weight), retain_graph=True)
    for found in (whole, parts):
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, expected)
        gradients = torch.autograd.grad(found, (hidden, weight))
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
