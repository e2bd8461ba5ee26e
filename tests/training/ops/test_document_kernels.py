"""Kernels that support documents, with stand-ins for their libraries: how they are called."""

# ruff: noqa: N803, N806  (A, B, C, D are the paper's own names)
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.training.ops.test_documents import LENGTH, Lengths, assert_as_alone, normal, scan_named
from tests.training.ops.test_scan import made as scan_inputs
from tests.training.ops.test_scan import recurrence
from tests.training.ops.test_ssd import ssd_inputs
from tests.training.support.documents import numbers, rows
from training.ops import attention as attention_module
from training.ops import conv, scan
from training.ops import ssd as ssd_module
from training.ops.attention import attention
from training.ops.conv import causal_conv1d
from training.ops.documents import Documents
from training.ops.scan import selective_scan
from training.ops.ssd import ssd


@contextmanager
def standing_in(**modules: SimpleNamespace) -> Iterator[None]:
    """Make modules importable; a _ in a name stands for a point."""
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
    """Compute like mamba-ssm's, with the length last: (b, d, l), B and C (b, n, l)."""
    assert delta_softplus
    u, delta, B, C = (one.transpose(1, 2) for one in (u, delta, B, C))  # (b, l, d | d | n | n)
    D = torch.zeros_like(A[:, 0]) if D is None else D
    gate = None if z is None else z.transpose(1, 2)  # (b, l, d)
    return recurrence(u, delta, A, B, C, D, gate, delta_bias).transpose(1, 2)  # (b, d, l)


@pytest.mark.slow
@pytest.mark.parametrize("gated", [True, False])
def test_mamba_ssms_scan_forgets_where_a_document_begins(gated: bool) -> None:
    """It has no seq_idx; A down to 1e-4 and biases make it hard to choose the clearing steps."""
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
        # A and D are float32, as in the kernel, and so are their gradients. Those of A reach 300,
        # of which float32 keeps 2e-5; the small ones beside them are sums of large numbers.
        assert_as_alone(run, inputs, along, lengths, within=5e-5)

    interface = SimpleNamespace(selective_scan_fn=doubled)
    with standing_in(mamba_ssm__ops__selective_scan_interface=interface):
        each()


def by_documents(
    seq_idx: Tensor | None, run: Callable[[int, slice], Tensor], like: Tensor
) -> Tensor:
    """Compute each document by itself, like a library that takes seq_idx (b, l)."""
    y = torch.zeros_like(like)  # (b, l, ...)
    for row in range(len(like)):
        numbers_ = torch.zeros(like.shape[1]) if seq_idx is None else seq_idx[row]  # (l,)
        for number in numbers_.unique():
            where = (numbers_ == number).nonzero()[:, 0]  # (length,)
            steps = slice(int(where[0]), int(where[-1]) + 1)
            y[row, steps] = run(row, steps)
    return y


def test_kernels_that_know_documents_are_reported_by_their_names() -> None:
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

    x, weight = normal(2, 12, 8).detach(), normal(8, 1, 4).detach()
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
    """The last queries of a row have keys of earlier documents, which then have no query."""
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
    """Otherwise the tests above would not compare the same thing."""
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
