"""Every operation gives, on rows of several documents, what it gives for each document alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.training.ops.test_scan import made as scan_inputs
from tests.training.ops.test_ssd import ssd_inputs
from tests.training.support.documents import numbers, places, rows
from training.ops import attention as attention_module
from training.ops import scan
from training.ops import ssd as ssd_module
from training.ops.attention import attention
from training.ops.conv import causal_conv1d
from training.ops.documents import Documents
from training.ops.nki import torch_ops
from training.ops.rotary import angles, rotate
from training.ops.scan import selective_scan
from training.ops.ssd import ssd

LENGTH = 37
MANY = settings(max_examples=40, deadline=None)
Lengths = Sequence[Sequence[int]]


def assert_as_alone(
    run: Callable[[Mapping[str, Any], Documents | None], Tensor],
    inputs: Mapping[str, Any],
    along: Sequence[str],
    lengths: Lengths,
    within: float = 1e-10,
) -> None:
    """Compare the output and all gradients; `along` names the inputs that have a length."""
    y = run(inputs, Documents(numbers(lengths)))
    expected = torch.zeros_like(y)
    for row, steps in places(lengths):
        part = {
            name: one[row : row + 1, steps] if name in along else one
            for name, one in inputs.items()
        }
        expected[row, steps] = run(part, None)[0]
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    leaves = [one for one in inputs.values() if isinstance(one, Tensor)]
    found = torch.autograd.grad((y * weight).sum(), leaves)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    for one, other in zip((y, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=within, atol=within)


def normal(*shape: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64).requires_grad_()


@MANY
@given(rows(LENGTH), st.integers(1, 5), st.booleans(), st.booleans())
def test_the_convolution(lengths: Lengths, taps: int, silu: bool, biased: bool) -> None:
    inputs = {"x": normal(2, LENGTH, 3), "weight": normal(3, 1, taps, seed=1)}
    inputs |= {"bias": normal(3, seed=2)} if biased else {}

    def run(given: Mapping[str, Any], documents: Documents | None) -> Tensor:
        return causal_conv1d(given["x"], given["weight"], given.get("bias"), silu, documents)

    assert_as_alone(run, inputs, ["x"], lengths)

    def by_masks(given: Mapping[str, Any], documents: Documents | None) -> Tensor:
        bias = given.get("bias")
        if documents is None:
            return causal_conv1d(given["x"], given["weight"], bias, silu)
        return torch_ops.masked_conv1d(given["x"], given["weight"], bias, silu, documents)

    assert_as_alone(by_masks, inputs, ["x"], lengths)


def scanned(
    scan_: Callable[..., Tensor] = selective_scan,
) -> Callable[[Mapping[str, Any], Documents | None], Tensor]:
    def run(given: Mapping[str, Any], documents: Documents | None) -> Tensor:
        return scan_(**given, documents=documents)

    return run


def scan_named(gated: bool) -> dict[str, Tensor]:
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")
    values = scan_inputs(2, LENGTH, 3, 4, torch.float64, gated)
    return dict(zip(names, values, strict=False))


@pytest.mark.slow
@pytest.mark.parametrize("cut", [(32, 32), (8, 4), (6, 2), (1, 1)])
@pytest.mark.parametrize("gated", [True, False])
def test_the_selective_scan(monkeypatch: pytest.MonkeyPatch, cut: Any, gated: bool) -> None:
    monkeypatch.setitem(scan.CUT, "cpu", cut)

    @settings(max_examples=15, deadline=None)
    @given(rows(LENGTH))
    def each(lengths: Lengths) -> None:
        along = ["x", "dt", "B", "C", "z"]
        assert_as_alone(scanned(), scan_named(gated), along, lengths)

    each()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 5, 8, 64])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (2, 1)])
def test_ssd(monkeypatch: pytest.MonkeyPatch, chunk: int, heads: int, groups: int) -> None:
    monkeypatch.setattr(ssd_module, "CPU_CHUNK", chunk)
    inputs = ssd_inputs(2, LENGTH, heads, 4, groups, 3)

    @settings(max_examples=15, deadline=None)
    @given(rows(LENGTH))
    def each(lengths: Lengths) -> None:
        def run(given: Mapping[str, Any], documents: Documents | None) -> Tensor:
            return ssd(**given, chunk=64, documents=documents)

        assert_as_alone(run, inputs, ["x", "dt", "B", "C"], lengths)

    each()


@pytest.mark.parametrize("name", ["ssd", "scan"])
def test_a_large_step_of_one_document_costs_the_next_no_digits(name: str) -> None:
    """The next document's float32 steps are small; differences of sums would lose them."""
    lengths = [[10, 5, 40, 9]]
    if name == "ssd":
        inputs = ssd_inputs(1, 64, 2, 4, 1, 3, dtype=torch.float32)
    else:
        values = scan_inputs(1, 64, 3, 4, torch.float32)
        inputs = dict(zip(("x", "dt", "A", "B", "C", "D", "z", "dt_bias"), values, strict=True))
    with torch.no_grad():
        inputs["dt"][:, 3], inputs["dt"][:, 12] = 1e4, 1e4
        inputs["dt"][:, 15:] = -4.0

    def run(given: Mapping[str, Any], documents: Documents | None) -> Tensor:
        if name == "ssd":
            return ssd(**given, chunk=64, documents=documents)
        return selective_scan(**given, documents=documents)

    # Gradients of what all steps share are as large as the steps; here each step's are compared.
    y = run(inputs, Documents(numbers(lengths)))
    steps = slice(15, 55)
    part = {
        key: one[:, steps] if key in ("x", "dt", "B", "C", "z") else one
        for key, one in inputs.items()
    }
    alone = run(part, None)
    torch.testing.assert_close(y[:, steps], alone, rtol=1e-6, atol=1e-6)
    weight = torch.randn(alone.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((y[:, steps] * weight).sum(), inputs["dt"])[0][:, steps]
    wanted = torch.autograd.grad((alone * weight).sum(), inputs["dt"])[0][:, steps]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["torch", "sdpa"])
@pytest.mark.parametrize("window", [0, 1, 6])
@pytest.mark.parametrize("block", [4, 128])
def test_attention(monkeypatch: pytest.MonkeyPatch, way: str, window: int, block: int) -> None:
    monkeypatch.setenv("TRAINING_OPS", f"attention={way}")
    monkeypatch.setattr(attention_module, "BLOCK", block)
    inputs = {"q": normal(2, LENGTH, 4, 6)}
    inputs |= {name: normal(2, LENGTH, 2, 6, seed=at) for at, name in enumerate("kv", 1)}

    @settings(max_examples=10, deadline=None)
    @given(rows(LENGTH))
    def each(lengths: Lengths) -> None:
        def run(given: Mapping[str, Any], documents: Documents | None) -> Tensor:
            return attention(**given, window=window, documents=documents)

        assert_as_alone(run, inputs, ["q", "k", "v"], lengths)

    each()


@pytest.mark.parametrize("way", ["torch", "sdpa"])
def test_attention_with_padding_too(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setenv("TRAINING_OPS", f"attention={way}")
    q, k, v = (normal(1, 12, 2, 4, seed=at) for at in range(3))
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[:, 5:7] = False
    documents = Documents(numbers([[5, 7]]))
    o = attention(q, k, v, mask=mask, documents=documents)
    torch.testing.assert_close(o[:, :5], attention(q[:, :5], k[:, :5], v[:, :5]))
    torch.testing.assert_close(o[:, 7:], attention(q[:, 7:], k[:, 7:], v[:, 7:]))
    assert (o[:, 5:7] == 0).all()  # they are padding, and see only padding


def test_positions_begin_anew() -> None:
    documents = Documents(numbers([[3, 1, 4], [8]]))
    assert documents.positions.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3], list(range(8))]
    assert documents.cu_seqlens.tolist() == [0, 3, 4, 8, 16] and documents.longest == 8
    assert documents.cu_seqlens.dtype == torch.int32
    x = normal(2, 8, 3, 4)
    turned = rotate(x, *angles(documents.positions, 4, 1e4))
    alone = rotate(x[:1, 4:], *angles(torch.arange(4), 4, 1e4))
    torch.testing.assert_close(turned[:1, 4:], alone, rtol=0, atol=0)


def test_nothing_is_made_for_chunks_without_a_boundary() -> None:
    documents = Documents(numbers([[10, 22], [16, 16]]))
    assert documents.seen(slice(0, 8)) is None and documents.begin_in(0, 8) == []
    assert documents.begin_in(8, 16) == [(0, 2)] and documents.begin_in(16, 24) == [(1, 0)]
    assert documents.seen(slice(8, 16)) is not None  # a document begins inside
    assert documents.seen(slice(16, 24)) is not None  # and at its start
    assert documents.seen(slice(24, 32)) is None
    assert documents.seen(slice(8, 16)) is documents.seen(slice(8, 16))


# The fast implementations, with stand-ins that do what their libraries document: the tests check
# how they are called. The real ones need a GPU.


@pytest.mark.parametrize("silu", [True, False])
def test_a_convolution_takes_gradients_of_any_layout_and_weights_of_another_type(
    silu: bool,
) -> None:
    documents = Documents(torch.tensor([[0, 0, 1, 1, 1, 2]] * 2, dtype=torch.int32))
    x = torch.randn(2, 6, 5, requires_grad=True)
    narrow = x.detach().bfloat16().requires_grad_()
    weight, bias = torch.randn(5, 1, 4), torch.randn(5)
    dy = torch.randn(5, 6, 2).permute(2, 1, 0)  # (b, l, d), the channels apart
    kept = dy.clone()
    gradients = []
    for inputs, gradient in ((x, dy), (x, dy.contiguous()), (narrow, dy)):
        y = causal_conv1d(inputs, weight, bias, silu, documents)  # (b, l, d)
        gradients.append(torch.autograd.grad(y, inputs, gradient)[0])
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[2].float(), gradients[1], rtol=0.05, atol=0.05)
    assert torch.equal(dy, kept)
