"""The fast implementations against the torch ones, on a GPU.

Tolerances are relative: the norm of the difference over the norm of torch's, for the result and for
each gradient. float32: 4e-3, because kernels multiply in TensorFloat-32, which truncates a factor's
mantissa to 10 bits: by up to 2^-10 of it, half of that on average, always in the same direction. A
product of two factors is too small by 1e-3, and SSD's kernels chain three of them. bfloat16: 2e-2,
a few times the error of its 8 bits.
"""

# ruff: noqa: N806  (A, B, C, D are the paper's own names)
from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.training.support.families import PRESETS, filled
from training.models import preset
from training.ops.attention import attention
from training.ops.conv import causal_conv1d
from training.ops.dispatch import VARIABLE
from training.ops.gated_norm import gated_rms_norm
from training.ops.norm import rms_norm
from training.ops.route import experts, route
from training.ops.scan import selective_scan
from training.ops.ssd import ssd

pytestmark = [
    pytest.mark.hardware("GPU"),
    pytest.mark.processes,  # Triton calls ldconfig and compiles
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

TOLERANCE = {torch.float32: 4e-3, torch.bfloat16: 2e-2}
MODULES = {
    "triton": "triton",
    "mamba-ssm": "mamba_ssm",
    "causal-conv1d": "causal_conv1d",
    "flash": "flash_attn",
}

Work = Callable[..., Tensor]


def normal(*shape: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random).cuda()


def scan_inputs() -> tuple[Work, list[Tensor], list[Tensor]]:
    """Return the computation, its inputs in the dtype under test, and those that stay float32."""
    b, l, d, n = 2, 333, 64, 16  # noqa: E741
    narrow = [normal(b, l, d, seed=1), normal(b, l, d, seed=2), normal(b, l, n, seed=3)]
    narrow += [normal(b, l, n, seed=4), normal(b, l, d, seed=5)]
    wide = [-torch.exp(normal(d, n, seed=6)), normal(d, seed=7), normal(d, seed=8)]

    def work(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor, *wide: Tensor) -> Tensor:  # noqa: N803
        A, D, bias = wide
        return selective_scan(x, dt, A, B, C, D, z, bias)

    return work, narrow, wide


def ssd_inputs() -> tuple[Work, list[Tensor], list[Tensor]]:
    b, l, h, p, g, n = 2, 333, 8, 64, 2, 64  # noqa: E741
    narrow = [normal(b, l, h, p, seed=1), normal(b, l, h, seed=2)]
    narrow += [normal(b, l, g, n, seed=3), normal(b, l, g, n, seed=4)]
    wide = [-torch.exp(normal(h, seed=6)), normal(h, seed=7), normal(h, seed=8)]

    def work(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, *wide: Tensor) -> Tensor:  # noqa: N803
        A, D, bias = wide
        return ssd(x, dt, A, B, C, D, 256, bias)

    return work, narrow, wide


def conv_inputs() -> tuple[Work, list[Tensor], list[Tensor]]:
    shapes = ((2, 333, 64), (64, 1, 4), (64,))
    narrow = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    return lambda x, weight, bias: causal_conv1d(x, weight, bias, silu=True), narrow, []


def norm_inputs() -> tuple[Work, list[Tensor], list[Tensor]]:
    narrow = [normal(2, 333, 768, seed=1), normal(768, seed=2)]
    return lambda x, weight: rms_norm(x, weight, 1e-5), narrow, []


def gated_norm_inputs() -> tuple[Work, list[Tensor], list[Tensor]]:
    narrow = [normal(2, 333, 768, seed=1), normal(2, 333, 768, seed=2), normal(768, seed=3)]
    return lambda x, z, weight: gated_rms_norm(x, z, weight, 2, 1e-5), narrow, []


def attention_inputs(window: int) -> tuple[Work, list[Tensor], list[Tensor]]:
    narrow = [normal(2, 333, 8, 64, seed=1), normal(2, 333, 2, 64, seed=2)]
    narrow += [normal(2, 333, 2, 64, seed=3)]
    return lambda q, k, v: attention(q, k, v, window=window), narrow, []


CASES = {
    "selective_scan triton": scan_inputs,
    "selective_scan mamba-ssm": scan_inputs,
    "ssd mamba-ssm": ssd_inputs,
    "causal_conv1d causal-conv1d": conv_inputs,
    "rms_norm mamba-ssm": norm_inputs,
    "gated_rms_norm mamba-ssm": gated_norm_inputs,
    "attention sdpa": lambda: attention_inputs(0),
    "attention sdpa, window": lambda: attention_inputs(50),
    "attention flash": lambda: attention_inputs(0),
    "attention flash, window": lambda: attention_inputs(50),
}


def computed(work: Work, given: list[Tensor]) -> list[Tensor]:
    """Return the result, and the gradient of each input."""
    inputs = [value.detach().clone().requires_grad_() for value in given]
    y = work(*inputs)
    weight = normal(*y.shape, seed=9).to(y.dtype)
    return [y, *torch.autograd.grad((y * weight).float().sum(), inputs)]


@pytest.mark.parametrize(
    ("case", "dtype"),
    # flash computes in 16 bits only.
    [(c, d) for c in CASES for d in TOLERANCE if d == torch.bfloat16 or "flash" not in c],
    ids=str,
)
def test_fast_equals_torch(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    operation, way = case.partition(",")[0].split()
    if way in MODULES and importlib.util.find_spec(MODULES[way]) is None:
        pytest.skip(f"{MODULES[way]} is not installed")
    work, narrow, wide = CASES[case]()
    given = [*(value.to(dtype) for value in narrow), *wide]
    monkeypatch.setenv(VARIABLE, f"{operation}=torch")
    wanted = computed(work, given)
    monkeypatch.setenv(VARIABLE, f"{operation}={way}")
    found = computed(work, given)
    assert [one.dtype for one in found] == [one.dtype for one in wanted]
    differences = [
        float((one.double() - other.double()).norm() / other.double().norm())
        for one, other in zip(found, wanted, strict=True)
    ]
    assert max(differences) <= TOLERANCE[dtype], differences


def test_our_scan_repeats_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "selective_scan=triton")
    work, narrow, wide = scan_inputs()
    given = [*(value.bfloat16() for value in narrow), *wide]
    once, again = (computed(work, given) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


def test_experts_repeat_exactly() -> None:
    x, gate = normal(500, 64, seed=1), normal(8, 64, seed=2)
    w1, w3, w2 = normal(8, 96, 64, seed=3), normal(8, 96, 64, seed=4), normal(8, 64, 96, seed=5)

    def work(*given: Tensor) -> Tensor:
        x, gate, w1, w3, w2 = given
        weights, chosen, _ = route(x, gate, 2)
        return experts(x, weights, chosen, w1, w3, w2)

    once, again = (computed(work, [x, gate, w1, w3, w2]) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_gives_what_it_gives_on_the_cpu(name: str) -> None:
    """Loss and gradients in float32, with whatever implementations are chosen."""
    tokens = torch.randint(256, (2, 200), generator=torch.Generator().manual_seed(0))
    results = []
    for device in ("cpu", "cuda"):
        model = filled(preset(name)).to(device)
        loss = model(tokens[:, :-1].to(device), tokens[:, 1:].to(device))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        results.append([one.detach().cpu() for one in (loss, *gradients)])
    differences = [
        float((on_gpu - on_cpu).norm() / on_cpu.norm())
        for on_cpu, on_gpu in zip(*results, strict=True)
    ]
    assert max(differences) <= TOLERANCE[torch.float32], differences


@pytest.mark.parametrize("name", PRESETS)
def test_a_document_is_as_if_it_were_alone(name: str) -> None:
    """Logits and gradients in float32 of a row of four documents, with the chosen kernels."""
    lengths = (57, 1, 99, 42)
    model = filled(preset(name)).cuda()
    tokens = torch.randint(256, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    tokens = tokens.cuda()  # (1, l)
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))  # (l,)
    weight = normal(1, sum(lengths), preset(name).vocab_size, seed=9)  # (1, l, v)
    results = []
    for pieces in (
        [model(tokens, seq_idx=numbers[None].int().cuda())],
        [model(one) for one in tokens.split(lengths, dim=1)],
        [model(tokens)],
    ):
        logits = torch.cat(pieces, dim=1)  # (1, l, v)
        gradients = torch.autograd.grad((logits * weight).sum(), list(model.parameters()))
        results.append([logits.detach(), *gradients])
    apart, alone, leaking = results
    differences = [
        float((one - other).norm() / other.norm()) for one, other in zip(apart, alone, strict=True)
    ]
    assert max(differences) <= TOLERANCE[torch.float32], differences
    assert (leaking[0] - alone[0]).norm() > TOLERANCE[torch.float32] * alone[0].norm()
