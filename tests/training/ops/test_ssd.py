"""SSD and the gated norm against naive versions of them."""

# ruff: noqa: N803, N806  (A, B, C, D are the paper's own names)
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from training.errors import RequestError
from training.ops import ssd as ssd_module
from training.ops.gated_norm import GatedRMSNorm, gated_rms_norm
from training.ops.ssd import ssd, ssd_from

CHUNK = 64  # the model's; on a CPU the operation uses its own


def ssd_inputs(
    b: int,
    length: int,
    h: int,
    p: int,
    g: int,
    n: int,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    inputs = {
        "x": normal(b, length, h, p),
        "dt": normal(b, length, h),
        "A": -torch.exp(normal(h)),
        "B": normal(b, length, g, n),
        "C": normal(b, length, g, n),
        "D": normal(h),
        "dt_bias": normal(h),
    }
    return {name: value.requires_grad_() for name, value in inputs.items()}


def recurrence(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor
) -> Tensor:
    """Compute the definition: one step after the other, with B and C expanded to every head."""
    heads = x.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(heads, dim=2), C.repeat_interleave(heads, dim=2)  # (b, l, h, n)
    delta = F.softplus(dt + dt_bias)  # (b, l, h)
    state = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3])  # (b, h, p, n)
    ys = []
    for t in range(x.shape[1]):
        decay = torch.exp(delta[:, t] * A)[..., None, None]  # (b, h, 1, 1)
        added = (delta[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]  # (b, h, p, n)
        state = decay * state + added  # (b, h, p, n)
        ys.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])  # (b, h, p)
    return torch.stack(ys, dim=1)  # (b, l, h, p)


def both_gradients(
    inputs: dict[str, Any], y: Tensor, expected: Tensor
) -> list[tuple[str, Tensor, Tensor]]:
    weight = torch.randn(y.shape, dtype=y.dtype)
    found = torch.autograd.grad((y * weight).sum(), list(inputs.values()))
    wanted = torch.autograd.grad((expected * weight).sum(), list(inputs.values()))
    return list(zip(inputs, found, wanted, strict=True))


@pytest.mark.parametrize("chunk", [1, 5, 8, 64])
@pytest.mark.parametrize("length", [1, 7, 8, 33, 100])
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (6, 1), (6, 2), (3, 3)])
def test_ssd_equals_the_recurrence(
    monkeypatch: pytest.MonkeyPatch, chunk: int, length: int, heads: int, groups: int
) -> None:
    monkeypatch.setattr(ssd_module, "CPU_CHUNK", chunk)
    inputs = ssd_inputs(2, length, heads, 4, groups, 3)
    y, expected = ssd(**inputs, chunk=CHUNK), recurrence(**inputs)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    for name, found, wanted in both_gradients(inputs, y, expected):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.slow
def test_ssd_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_module, "CPU_CHUNK", 4)
    inputs = ssd_inputs(2, 9, 4, 2, 2, 3)

    def called(*tensors: Any) -> Tensor:
        return ssd(**dict(zip(inputs, tensors, strict=True)), chunk=CHUNK)

    assert torch.autograd.gradcheck(called, list(inputs.values()))


def test_ssd_needs_no_bias_of_the_steps() -> None:
    inputs = ssd_inputs(1, 20, 2, 4, 1, 3)
    without = {name: value for name, value in inputs.items() if name != "dt_bias"}
    y = ssd(**without, chunk=CHUNK)
    expected = recurrence(**without, dt_bias=torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(y, expected)
    for name, found, wanted in both_gradients(without, y, expected):
        torch.testing.assert_close(found, wanted, msg=name)


def test_ssd_takes_views_of_one_projection() -> None:
    """As in the model, x, B and C are columns of one tensor, and dy may be transposed."""
    inputs = ssd_inputs(2, 70, 4, 8, 2, 3)
    names, sizes = ("x", "B", "C"), (32, 6, 6)
    one = torch.cat([inputs[name].flatten(2) for name in names], dim=-1).detach().requires_grad_()
    parts = dict(zip(names, one.split(sizes, dim=-1), strict=True))
    views = {name: part.unflatten(2, inputs[name].shape[2:]) for name, part in parts.items()}
    y, expected = ssd(**(inputs | views), chunk=CHUNK), recurrence(**(inputs | views))
    weight = torch.randn(2, 8, 4, 70, dtype=torch.float64).permute(0, 3, 2, 1)
    found, wanted = (torch.autograd.grad((value * weight).sum(), one) for value in (y, expected))
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(found, wanted)


def test_ssd_in_float32_is_close_to_float64() -> None:
    inputs = ssd_inputs(1, 300, 4, 16, 1, 16)
    exact = recurrence(**inputs)
    y = ssd(**{name: value.float() for name, value in inputs.items()}, chunk=CHUNK)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-4)


def test_small_steps_after_a_large_one_keep_their_digits() -> None:
    """A step of e^-10000 clears the state; the small ones after it decay as they do alone."""
    inputs = ssd_inputs(1, 60, 2, 4, 1, 3)
    with torch.no_grad():
        inputs["dt"][:, 10] = 1e4
        inputs["dt"][:, 11:] = -3.0
        inputs["A"].fill_(-1.0)
        inputs["x"][:, :11] = 0
    y = ssd(**{name: value.float() for name, value in inputs.items()}, chunk=CHUNK).double()
    expected = recurrence(**inputs)
    # With float32 sums, the errors are 2e-4 for y and 4e-3 for A's gradient.
    for name, found, wanted in [("y", y, expected), *both_gradients(inputs, y, expected)]:
        assert (found - wanted).norm() < 1e-5 * wanted.norm(), name


def test_ssd_in_bfloat16_computes_in_float32() -> None:
    inputs = ssd_inputs(1, 100, 4, 8, 2, 16, dtype=torch.bfloat16)
    y = ssd(**inputs, chunk=CHUNK)
    assert y.dtype == torch.bfloat16
    exact = ssd(**{name: value.float() for name, value in inputs.items()}, chunk=CHUNK)
    torch.testing.assert_close(y, exact.bfloat16(), rtol=0, atol=0)
    gradients = torch.autograd.grad(y.sum(), list(inputs.values()))
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients)


@pytest.mark.parametrize("dt", [-1e3, 1e3])
@pytest.mark.parametrize("decay", [-1e-3, -1e3])
def test_ssd_survives_extreme_steps(dt: float, decay: float) -> None:
    """Cumulative decays of e^-64000000 and of 1: no overflow, no NaN, also in the gradients."""
    inputs = ssd_inputs(1, 200, 4, 4, 1, 3, dtype=torch.float32)
    with torch.no_grad():
        inputs["dt"].fill_(dt)
        inputs["A"].fill_(decay)
    y = ssd(**inputs, chunk=CHUNK)
    gradients = torch.autograd.grad(y.sum(), list(inputs.values()))
    assert all(value.isfinite().all() for value in (y, *gradients))


def kept_by(length: int) -> int:
    """Count the numbers that are kept for the backward pass."""
    kept = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        ssd(**ssd_inputs(1, length, 4, 16, 1, 16, dtype=torch.float32), chunk=CHUNK)
    return sum(kept)


def test_ssd_keeps_the_inputs_and_one_state_a_chunk() -> None:
    length, h, p, n = 512, 4, 16, 16
    inputs = length * (h * p + h + 2 * n) + 3 * h
    states = length // ssd_module.CPU_CHUNK * h * p * n
    assert kept_by(length) == inputs + states
    assert kept_by(2 * length) < 2.01 * kept_by(length)


class Largest(TorchDispatchMode):
    """Records the sizes of the tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.size = max(self.size, made.numel())
        return made


def test_ssd_makes_nothing_larger_than_a_chunk_needs() -> None:
    """The largest tensor of both passes does not grow with the length."""
    heads, sizes = 4, set()
    for length in (128, 1024):
        y_size = length * heads * 2
        assert y_size < heads * ssd_module.CPU_CHUNK**2
        with Largest() as largest:
            ssd(**ssd_inputs(1, length, heads, 2, 1, 2), chunk=CHUNK).sum().backward()
        sizes.add(largest.size)
    assert sizes == {heads * ssd_module.CPU_CHUNK**2}


@pytest.mark.parametrize("cuts", [(0, 90), (0, 1, 90), (0, 64, 65, 90), tuple(range(91))])
def test_ssd_goes_on_from_a_state(cuts: tuple[int, ...]) -> None:
    inputs = ssd_inputs(2, 90, 4, 8, 2, 3)
    steps = {name: inputs[name] for name in ("x", "dt", "B", "C")}
    heads = {name: inputs[name] for name in ("A", "D", "dt_bias")}
    state = torch.zeros(2, 3, 2, 16, dtype=torch.float64).transpose(1, 2)  # with any strides
    ys = []
    for first, last in itertools.pairwise(cuts):
        part = {name: value[:, first:last] for name, value in steps.items()}
        ys.append(ssd_from(state, **part, **heads, chunk=CHUNK))
    torch.testing.assert_close(torch.cat(ys, dim=1), ssd(**inputs, chunk=CHUNK))
    assert not any(y.requires_grad for y in ys)


def test_kernels_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_OPS", "ssd=mamba-ssm,gated_rms_norm=mamba-ssm")
    with pytest.raises(RequestError, match="ssd=mamba-ssm cannot run: it needs a GPU"):
        ssd(**ssd_inputs(1, 3, 1, 2, 1, 2), chunk=CHUNK)
    with pytest.raises(RequestError, match="gated_rms_norm=mamba-ssm cannot run: it needs a GPU"):
        GatedRMSNorm(4, 1, 1e-5)(torch.ones(1, 4), torch.ones(1, 4))


def naive_norm(x: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Compute the definition: one group after the other."""
    gated = x * z / (1 + torch.exp(-z))
    normal = [t / torch.sqrt((t * t).mean(-1, keepdim=True) + eps) for t in gated.chunk(groups, -1)]
    return weight * torch.cat(normal, dim=-1)


def norm_inputs() -> tuple[Tensor, Tensor, Tensor]:
    x, z, weight = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 5, 12), (2, 5, 12), (12,))
    )
    return x, z, weight


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_gated_norm_equals_its_definition(groups: int) -> None:
    inputs = norm_inputs()
    y, expected = gated_rms_norm(*inputs, groups, 1e-3), naive_norm(*inputs, groups, 1e-3)
    torch.testing.assert_close(y, expected)
    weight = torch.randn_like(y)
    found, wanted = (torch.autograd.grad((value * weight).sum(), inputs) for value in (y, expected))
    for gradient, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, reference)


def test_gated_norm_gradcheck() -> None:
    def called(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        return gated_rms_norm(x, z, weight, 3, 1e-3)

    assert torch.autograd.gradcheck(called, norm_inputs())


def test_gated_norm_in_bfloat16_computes_in_float32() -> None:
    norm = GatedRMSNorm(64, 4, eps=1e-5).bfloat16()
    x, z = (torch.randn(2, 3, 64).mul(300).bfloat16() for _ in range(2))
    y = norm(x, z)
    assert y.dtype == torch.bfloat16
    expected = naive_norm(x.double(), z.double(), norm.weight.double(), 4, 1e-5)
    torch.testing.assert_close(y, expected.bfloat16(), rtol=1e-2, atol=1e-6)
    assert math.isfinite(norm(torch.zeros(1, 64), torch.zeros(1, 64)).sum().item())


def test_gated_norm_keeps_its_inputs_and_one_number_a_group() -> None:
    kept = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    x, z, weight = norm_inputs()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        gated_rms_norm(x, z, weight, 3, 1e-5)
    assert sum(kept) == x.numel() + z.numel() + weight.numel() + 2 * 5 * 3


@pytest.mark.parametrize("limit", [(0.3, 0.9), (0.5, math.inf), (0.0, 0.6)])
def test_a_limit_keeps_delta_within_it(limit: tuple[float, float]) -> None:
    """Compare with the recurrence for the limited delta; gradients come from torch's own clamp."""
    inputs = ssd_inputs(2, 70, 4, 3, 2, 5)
    x, dt, A, B, C, D = (inputs[name].requires_grad_() for name in ("x", "dt", "A", "B", "C", "D"))
    bias = inputs["dt_bias"].requires_grad_()
    delta = F.softplus(dt + bias).clamp(*limit)  # (b, l, h)
    assert 0.1 < (delta == F.softplus(dt + bias)).double().mean() < 0.9
    h = x.new_zeros(2, 4, 5, 3)  # (b, h, n, p)
    ys = []
    for t in range(70):
        b, c = (one[:, t].repeat_interleave(2, 1) for one in (B, C))  # (b, h, n)
        u = (delta[:, t, :, None] * x[:, t])[:, :, None]  # (b, h, 1, p)
        h = h * (delta[:, t] * A).exp()[..., None, None] + b[..., None] * u  # (b, h, n, p)
        ys.append((c[..., None] * h).sum(2) + D[:, None] * x[:, t])  # (b, h, p)
    expected = torch.stack(ys, 1)  # (b, l, h, p)
    y = ssd(x, dt, A, B, C, D, 16, bias, limit)  # (b, l, h, p)
    torch.testing.assert_close(y, expected)
    leaves = (x, dt, A, B, C, D, bias)
    weights = torch.randn_like(y)  # (b, l, h, p)
    for one, other in zip(
        torch.autograd.grad((y * weights).sum(), leaves),
        torch.autograd.grad((expected * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    state = x.new_zeros(2, 2, 5, 6)  # (b, g, n, r p)
    parts = [
        ssd_from(
            state, x[:, cut], dt[:, cut], A, B[:, cut], C[:, cut], D, 16, bias, limit
        )  # (b, l, h, p)
        for cut in (slice(0, 33), slice(33, 70))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), expected)
