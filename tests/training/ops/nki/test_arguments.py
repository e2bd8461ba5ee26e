"""What the kernels do not support is refused with a message, with or without NKI."""

# ruff: noqa: N806  (B and C are the paper's own names)
from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.training.ops.test_ssd import ssd_inputs
from training.errors import RequestError
from training.ops.nki.arguments import check_conv, check_ssd
from training.ops.nki.torch_ops import ssd


@pytest.mark.parametrize(
    ("shape", "shown"),
    [
        ((1, 100, 2, 64, 1, 128), "the length is 100; it must be a multiple of 128"),
        ((1, 128, 2, 64, 1, 64), "the state size is 64; it must be 128"),
        ((1, 128, 2, 256, 1, 128), "a head has 256 channels; it may have 128"),
        ((1, 128, 3, 64, 2, 128), "3 heads cannot be shared out to 2 groups"),
        ((1, 128, 513, 1, 1, 128), "a group has 513 heads; it may have 512"),
        ((1, 128, 256, 128, 1, 128), "a group has 32768 channels; it may have 16384"),
    ],
)
def test_shapes_that_ssd_cannot_take(shape: tuple[int, ...], shown: str) -> None:
    b, length, heads, p, groups, n = shape
    x, B = torch.empty(b, length, heads, p), torch.empty(b, length, groups, n)
    with pytest.raises(RequestError, match=f"NKI, SSD: {shown}"):
        check_ssd(x, B, B)


def test_all_faults_are_reported_at_once() -> None:
    x, B = torch.empty(1, 100, 2, 64), torch.empty(1, 100, 1, 64, dtype=torch.float64)
    with pytest.raises(RequestError) as caught:
        check_ssd(x, B, B)
    assert "4 faults" in str(caught.value)
    assert "B is torch.float64; it must be float32 or bfloat16" in str(caught.value)


def test_shapes_that_the_convolution_cannot_take() -> None:
    with pytest.raises(RequestError, match="there are 100 channels; they must be a multiple"):
        check_conv(torch.empty(1, 8, 100), torch.empty(100, 1, 4))
    with pytest.raises(RequestError, match=r"the weight is \(128, 2, 4\)"):
        check_conv(torch.empty(1, 8, 128), torch.empty(128, 2, 4))


def test_without_nki_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nki", "neuronxcc"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in [one for one in sys.modules if one.startswith("training.ops.nki.")]:
        monkeypatch.delitem(sys.modules, name)
    inputs = ssd_inputs(1, 128, 1, 16, 1, 128, dtype=torch.float32)
    arguments: list[Any] = [*inputs.values(), 128]
    with pytest.raises(RequestError, match="NKI kernels cannot run: "):
        ssd(*arguments)
