"""Every operation on rows of several documents gives what it gives for each document alone."""

# ruff: noqa: N803, N806  (A, B, C, D are the paper's own names)
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.training.ops.test_scan import made as scan_inputs
from tests.training.ops.test_scan import recurrence
from tests.training.ops.test_ssd import ssd_inputs
from tests.training.support.documents import numbers, places, rows
from training.ops import attention as attention_module
from training.ops import conv, scan
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
    """Compare the output and all gradients; `along` are the inputs that have a length."""
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
    """A step of e^-10000 before it: float32, as differences of sums would lose the small ones."""
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

    # Gradients of what all steps share are as large as the steps; those of each step are held here.
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
    assert (o[:, 5:7] == 0).all()  # they are padding, and see nothing but padding


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
    assert documents.seen(slice(0, 8)) is None and documents.begin_in(0, 8) is None
    assert documents.seen(slice(8, 16)) is not None  # a document begins inside
    assert documents.seen(slice(16, 24)) is not None  # and with it
    assert documents.seen(slice(24, 32)) is None
    assert documents.seen(slice(8, 16)) is documents.seen(slice(8, 16))


# The fast implementations, with stand-ins that do what their libraries document: what is tested is
# how they are called. The real ones take a GPU.


@contextmanager
def standing_in(**modules: SimpleNamespace) -> Iterator[None]:
    """Let modules be imported; a name's _ are points."""
    names = {name.replace("__", "."): content for name, content in modules.items()}
    before = {name: sys.modules.get(name) for name in names}
    for name, content in names.items():
        module = ModuleType(name)
        vars(module).update(vars(content))
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
) -> Tensor:
    """mamba-ssm's, which has the length last: (b, d, l), B and C (b, n, l)."""
    assert delta_softplus
    u, delta, B, C = (one.transpose(1, 2) for one in (u, delta, B, C))  # (b, l, d | d | n | n)
    D = torch.zeros_like(A[:, 0]) if D is None else D
    gate = None if z is None else z.transpose(1, 2)  # (b, l, d)
    return recurrence(u, delta, A, B, C, D, gate, delta_bias).transpose(1, 2)  # (b, d, l)


@pytest.mark.parametrize("gated", [True, False])
def test_mamba_ssms_scan_forgets_where_a_document_begins(gated: bool) -> None:
    """It has no seq_idx; A down to 1e-4 and biases make the steps that forget hard to choose."""
    inputs = scan_named(gated)
    with torch.no_grad():
        inputs["A"][0] *= 1e-4

    def doubled(*tensors: Any, **named: Any) -> Tensor:
        return selective_scan_fn(*tensors, **named).double()

    def run(given: Mapping[str, Any], documents: Documents | None) -> Tensor:
        held = {"z": None, "dt_bias": None, **given, "documents": documents}
        return scan._fast(**held)

    @settings(max_examples=20, deadline=None)
    @given(rows(LENGTH))
    def each(lengths: Lengths) -> None:
        along = ["x", "dt", "B", "C", "z"]
        # A and D are float32, as the kernel has them, and so are their gradients. Those of A
        # reach 300, of which float32 keeps 2e-5; the small ones beside them are sums of large.
        assert_as_alone(run, inputs, along, lengths, within=5e-5)

    interface = SimpleNamespace(selective_scan_fn=doubled)
    with standing_in(mamba_ssm__ops__selective_scan_interface=interface):
        each()


def by_documents(
    seq_idx: Tensor | None, run: Callable[[int, slice], Tensor], like: Tensor
) -> Tensor:
    """What a library does that takes seq_idx (b, l): each document by itself."""
    y = torch.zeros_like(like)  # (b, l, ...)
    for row in range(len(like)):
        numbers_ = torch.zeros(like.shape[1]) if seq_idx is None else seq_idx[row]  # (l,)
        for number in numbers_.unique():
            where = (numbers_ == number).nonzero()[:, 0]  # (length,)
            steps = slice(int(where[0]), int(where[-1]) + 1)
            y[row, steps] = run(row, steps)
    return y


def test_kernels_that_know_documents_are_told_by_their_names() -> None:
    lengths = [[5, 1, 6], [12]]
    seq_idx = numbers(lengths)
    given: dict[str, Tensor | None] = {}

    def causal_conv1d_fn(
        x: Tensor, weight: Tensor, bias: Any = None, seq_idx: Any = None, activation: Any = None
    ) -> Tensor:
        given["conv"] = seq_idx
        turned = x.transpose(1, 2)  # (b, l, d)

        def run(row: int, steps: slice) -> Tensor:
            part = turned[row : row + 1, steps]  # (1, length, d)
            return causal_conv1d(part, weight[:, None], bias, activation == "silu")[0]

        return by_documents(seq_idx, run, turned).transpose(1, 2)

    def mamba_chunk_scan_combined(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **named: Any
    ) -> Tensor:
        given["ssd"] = named["seq_idx"]

        def run(row: int, steps: slice) -> Tensor:
            parts = [one[row : row + 1, steps] for one in (x, dt, B, C)]
            A_, D = A.to(x.dtype), named["D"].to(x.dtype)
            return ssd(parts[0], parts[1], A_, parts[2], parts[3], D, chunk_size)[0]

        return by_documents(named["seq_idx"], run, x)

    x, weight = normal(2, 12, 3).detach(), normal(3, 1, 4).detach()
    documents = Documents(seq_idx)
    with standing_in(causal_conv1d=SimpleNamespace(causal_conv1d_fn=causal_conv1d_fn)):
        y = conv._fast(x, weight, None, True, documents)
        assert given["conv"] is seq_idx and seq_idx.dtype == torch.int32
        torch.testing.assert_close(y, causal_conv1d(x, weight, None, True, documents))
        conv._fast(x, weight, None, True, None)
        assert given.pop("conv") is None
    inputs = ssd_inputs(2, 12, 2, 4, 1, 3, dtype=torch.float32)
    parts: dict[str, Any] = {
        name: one.detach() for name, one in inputs.items() if name != "dt_bias"
    }
    combined = SimpleNamespace(mamba_chunk_scan_combined=mamba_chunk_scan_combined)
    with standing_in(mamba_ssm__ops__triton__ssd_combined=combined):
        found = ssd_module._fast(**parts, dt_bias=None, chunk=8, documents=documents)
        assert given["ssd"] is seq_idx
        torch.testing.assert_close(found, ssd(**parts, chunk=8, documents=documents))


@pytest.mark.parametrize("queries", [12, 7])
@pytest.mark.parametrize("window", [0, 3])
def test_flash_takes_documents_as_sequences_of_their_own(window: int, queries: int) -> None:
    """The last queries of a row have keys of documents before them, which then have no query."""
    lengths = [[5, 1, 6], [12]]
    q, k, v = (normal(2, 12, 2, 4, seed=at).detach() for at in range(3))
    q = q[:, -queries:]
    documents = Documents(numbers(lengths))

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **named: Any,
    ) -> Tensor:
        assert named["causal"] and max_seqlen_q == max_seqlen_k == 12
        assert cu_seqlens_k.tolist() == [0, 5, 6, 12, 24]
        assert cu_seqlens_q.tolist() == ([0, 5, 6, 12, 24] if queries == 12 else [0, 0, 1, 7, 14])
        assert named["window_size"] == ((window - 1, 0) if window else (-1, -1))
        o = torch.zeros_like(q)  # (b l, h, d)
        bounds = pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist())
        for (begin, end), keys in zip(*bounds, strict=True):
            parts = (one[None, slice(*keys)] for one in (k, v))
            if end > begin:
                o[begin:end] = attention(q[None, begin:end], *parts, window=window)[0]
        return o

    functions = SimpleNamespace(flash_attn_func=None, flash_attn_varlen_func=flash_attn_varlen_func)
    with standing_in(flash_attn=functions):
        o = attention_module._flash(q, k, v, window, None, 0.0, documents)
    torch.testing.assert_close(o, attention(q, k, v, window=window, documents=documents))


def test_softplus_of_the_stand_in_is_that_of_the_scan() -> None:
    """So that the tests above compare the same thing."""
    values = scan_inputs(1, 9, 2, 3, torch.float64)
    x, dt, A, B, C, D, z, bias = values
    y = selective_scan(*values)
    found = selective_scan_fn(
        x.transpose(1, 2),
        dt.transpose(1, 2),
        A,
        B.transpose(1, 2),
        C.transpose(1, 2),
        D,
        z.transpose(1, 2),
        bias,
        delta_softplus=True,
    )
    torch.testing.assert_close(found.transpose(1, 2), y)
