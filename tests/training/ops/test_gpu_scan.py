"""The Triton kernels of the selective scan against the torch one, in Triton's interpreter.

They are also compiled for GPUs; tests/training/ops/test_gpu.py tests their results there.
"""

# ruff: noqa: N806  (A, B, C, D are the paper's own names)
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import ROOT
from training.ops.documents import Documents
from training.ops.scan import selective_scan

pytestmark = [
    pytest.mark.triton,
    pytest.mark.hardware("a machine without a GPU"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels: test_gpu.py"),
]

CASES = {
    "of one chunk": {"length": 8},
    "of one step": {"length": 1},
    "of chunks": {"length": 24, "batch": 2},
    "with a chunk that ends early": {"length": 21},
    "of more channels than a program has": {"length": 9, "channels": 40},
    "of a state size that is no power of two": {"length": 9, "states": 3},
    "of documents": {"length": 21, "batch": 2, "documents": ((5, 1, 10, 5), (8, 8, 4, 1))},
    "without a gate": {"length": 9, "gated": False},
    "without a bias": {"length": 9, "biased": False},
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module, with short chunks."""
    from training.ops.gpu import scan

    monkeypatch.setattr(scan, "CHUNK", 8)
    return scan


def inputs(
    length: int,
    batch: int = 1,
    channels: int = 32,
    states: int = 4,
    documents: tuple[tuple[int, ...], ...] = (),
    gated: bool = True,
    biased: bool = True,
) -> tuple[list[Tensor | None], Documents | None]:
    """Make x, dt, A, B, C, D, z and dt_bias, the last two maybe None, and the documents."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    x, dt, z = (normal(batch, length, 2 * channels)[..., channels:] for _ in range(3))
    B, C = normal(batch, length, 2 * states + 1)[..., 1:].chunk(2, dim=-1)  # (b, l, n) both
    A, D, bias = -torch.exp(normal(channels, states) / 2), normal(channels), normal(channels)
    given = [x, dt - 2, A, B, C, D, z if gated else None, bias if biased else None]
    numbers = [
        torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in documents
    ]
    return given, Documents.of(torch.stack(numbers).int() if numbers else None)


def computed(work: Any, given: list[Tensor | None], documents: Documents | None) -> list[Tensor]:
    """Return the result, and the gradient of each input."""
    leaves = [None if one is None else one.detach().requires_grad_() for one in given]
    y = work(*leaves, documents)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))  # (b, l, d)
    wanted = [one for one in leaves if one is not None]
    return [y.detach(), *torch.autograd.grad((y.float() * weight).sum(), wanted)]


def torch_scan(*given: Any) -> Tensor:
    *inputs, documents = given
    return selective_scan(*inputs, documents=documents)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_scan(case: str, kernels: ModuleType) -> None:
    given, documents = inputs(**CASES[case])  # type: ignore[arg-type]
    wanted = computed(torch_scan, given, documents)
    for one, other in zip(computed(kernels.Scan.apply, given, documents), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lower", [5, 10, 20])
def test_the_gradient_of_a_small_delta_keeps_its_digits(lower: int, kernels: ModuleType) -> None:
    """Down to e^-22, where 1 - e^-delta is 0 in float32."""
    given, documents = inputs(length=21)
    dt = given[1]
    assert dt is not None
    given[1] = dt - lower  # (b, l, d)
    wanted = computed(torch_scan, given, documents)
    found = computed(kernels.Scan.apply, given, documents)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.slow
def test_in_bfloat16_sums_are_float32(kernels: ModuleType) -> None:
    given, _ = inputs(length=40)
    narrow: list[Tensor | None] = [
        one if one is None or index in (2, 5, 7) else one.bfloat16()
        for index, one in enumerate(given)
    ]
    wide = [one if one is None else one.float() for one in narrow]
    wanted = computed(torch_scan, wide, None)
    for one, other in zip(computed(kernels.Scan.apply, narrow, None), wanted, strict=True):
        assert (one.float() - other).norm() <= 5e-3 * other.norm()
    assert kernels.Scan.apply(*narrow, None).dtype == torch.bfloat16


def test_steps_may_lie_far_apart(kernels: ModuleType, tmp_path: Path) -> None:
    """As in long sequences, the last step of which is beyond 2^31 numbers."""
    given, _ = inputs(length=24)
    wanted = computed(torch_scan, given, None)
    step = 1 << 27
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(4 * 25 * step)
    whole = torch.from_file(str(tmp_path / "sparse"), shared=True, size=25 * step)
    for index in (0, 1, 6):
        near = given[index]  # (b, l, d)
        assert near is not None
        far = whole[64 * index :].as_strided(near.shape, (24 * step, step, 1))  # (b, l, d)
        given[index] = far.copy_(near)
    for one, other in zip(computed(kernels.Scan.apply, given, None), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_what_nothing_is_left_of_makes_no_nan(kernels: ModuleType) -> None:
    """Steps so long that each decay is 0, or so short that it is 1."""
    given, _ = inputs(length=9)
    given[1] = torch.tensor([1e4, -1e4, 0.0]).repeat(3)[None, :, None].expand(1, 9, 32)
    for one in computed(kernels.Scan.apply, given, None):
        assert one.isfinite().all()


@pytest.mark.processes
@pytest.mark.parametrize("architecture", ["90", "100", "120"])
def test_they_compile_for_a_gpu(architecture: str, tmp_path: Path) -> None:
    """Hopper and the two Blackwells that cuda13-mamba is built for, with Triton's own assembler."""
    argv = [sys.executable, "-m", "tests.training.support.compiled_kernels", architecture]
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        argv, cwd=ROOT, env={**os.environ, **own}, check=True, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert set(found) == {"ends", "across", "outputs", "back", "gradients"}
    assert all(one["warps"] == 1 and one["code"] > 1000 for one in found.values())
