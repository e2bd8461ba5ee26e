"""Softplus as Neuron computes it: equal to torch's at every size of x, with its gradient."""

# ruff: noqa: N806  (A, B, C are the paper's own names)
from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from training.ops import scan, ssd
from training.ops import softplus as module
from training.ops.nki import torch_ops
from training.ops.softplus import _Softplus, softplus

POINTS = [-math.inf, -1e4, -87.0, -20.1, -10.0, -1.0, -1e-30, 0.0, 0.001, 1.0, 10.0, 20.1, 88.9]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 3e-10), (torch.bfloat16, 1e-2)]
)
def test_written_out_it_is_torchs(dtype: torch.dtype, tolerance: float) -> None:
    x = torch.tensor([*POINTS, 1e4, math.inf], dtype=dtype, requires_grad=True)
    y = _Softplus.apply(x)
    expected = F.softplus(x.detach().double())
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=0.0)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(slope, torch.sigmoid(x.detach()))


def test_its_gradient_is_right_at_zero_too() -> None:
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    _Softplus.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.5, 0.5, 0.5]
    assert torch.autograd.gradcheck(_Softplus.apply, torch.randn(9).double().requires_grad_())


def test_off_neuron_it_is_torchs_own() -> None:
    x = torch.zeros(3)
    with Recorder() as recorder:
        softplus(x)
    assert recorder.seen == {"aten.softplus.default"}


class Recorder(TorchDispatchMode):
    """Records the torch operations that are computed in its block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


def test_no_operation_on_neuron_computes_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on meta tensors in place of the device's: they have shapes but no values."""
    monkeypatch.setattr(module, "NEURON", "meta")
    monkeypatch.setattr(torch_ops, "check_ssd", lambda *_: None)
    monkeypatch.setattr(torch_ops._SSD, "apply", lambda x, *_: x)
    limit = (0.0, 1.0)
    with torch.device("meta"), Recorder() as recorder:
        x, dt, A = torch.empty(1, 8, 2, 4), torch.empty(1, 8, 2).requires_grad_(), torch.empty(2)
        B, C = torch.empty(1, 8, 1, 4), torch.empty(1, 8, 1, 4)
        ssd._SSD.apply(x, dt, A, B, C, A, A, 4, limit).sum().backward()
        torch_ops.ssd(x, dt, A, B, C, A, A, 4, limit)
        scan._Chunk(x, x, B, C, None)
    assert "aten.log1p.default" in recorder.seen
    assert not [one for one in recorder.seen if "softplus" in one]


def test_it_is_computed_nowhere_else(root: Path) -> None:
    found = {
        str(path.relative_to(root))
        for path in (root / "training").rglob("*.py")
        if re.search(r"\b(F|functional|nn)\.[sS]oftplus\(", path.read_text())
    }
    assert found == {"training/ops/softplus.py"}
