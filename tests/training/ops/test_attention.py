"""Attention and rotary positions against their definitions, and what they may keep in memory."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from training.errors import RequestError
from training.ops import attention as module
from training.ops.attention import attention, attention_from, start
from training.ops.rope_scaling import RopeScaling
from training.ops.rotary import angles, rotate

WAYS = ("sdpa", "torch")


def heads(
    l: int,  # noqa: E741
    s: int,
    h: int = 4,
    g: int = 2,
    b: int = 2,
    d: int = 6,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make q, k and v."""
    random = torch.Generator().manual_seed(l + s)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=dtype, requires_grad=True)

    return normal(b, l, h, d), normal(b, s, g, d), normal(b, s, g, d)


def defined(q: Tensor, k: Tensor, v: Tensor, window: int, mask: Tensor | None) -> Tensor:
    """Compute the definition: one query after the other."""
    past, share = k.shape[1] - q.shape[1], q.shape[2] // k.shape[2]
    o = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            first = max(0, past + i - window + 1) if window else 0
            seen = [j for j in range(first, past + i + 1) if mask is None or mask[b, j]]
            for h in range(q.shape[2]):
                if seen:
                    scores = k[b, seen, h // share] @ q[b, i, h] / math.sqrt(q.shape[3])
                    o[b, i, h] = torch.softmax(scores, 0) @ v[b, seen, h // share]
    return o


def padded(s: int, left: int, right: int) -> Tensor:
    mask = torch.ones(2, s, dtype=torch.bool)
    mask[0, :left] = False
    mask[1, s - right :] = False
    return mask


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TRAINING_OPS", f"attention={request.param}")
    return str(request.param)


@pytest.mark.parametrize("block", [3, 4, 128])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("l", "s", "window", "padding"),
    [
        (9, 9, 0, None),
        (9, 9, 3, None),
        (8, 8, 1, None),
        (1, 7, 0, None),
        (1, 7, 4, None),
        (5, 11, 0, None),
        (5, 11, 4, None),
        (9, 9, 0, (4, 3)),
        (9, 9, 3, (5, 4)),
        (4, 9, 5, (2, 0)),
    ],
)
def test_attention_equals_its_definition(
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    block: int,
    groups: int,
    l: int,  # noqa: E741
    s: int,
    window: int,
    padding: tuple[int, int] | None,
) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    mask = None if padding is None else padded(s, *padding)
    inputs = heads(l, s, g=groups)
    found, wanted = (
        attention(*inputs, window=window, mask=mask),
        defined(*inputs, window, mask),
    )
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    weight = torch.randn(found.shape, dtype=torch.float64)
    gradients = torch.autograd.grad((found * weight).sum(), inputs)
    references = torch.autograd.grad((wanted * weight).sum(), inputs)
    for one, other in zip(gradients, references, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("window", "padding"), [(0, False), (3, False), (0, True), (3, True)])
def test_torch_attention_gradcheck(
    monkeypatch: pytest.MonkeyPatch, window: int, padding: bool
) -> None:
    monkeypatch.setenv("TRAINING_OPS", "attention=torch")
    monkeypatch.setattr(module, "BLOCK", 3)
    mask = padded(7, 2, 3) if padding else None
    inputs = heads(7, 7, h=2, g=1, d=2)
    assert torch.autograd.gradcheck(lambda *x: attention(*x, window=window, mask=mask), inputs)


def test_a_row_that_sees_only_padding_is_zero(way: str) -> None:
    inputs = heads(6, 6, dtype=torch.float32)
    mask = torch.tensor([[False] * 6, [False, False, True, True, True, True]])
    o = attention(*inputs, mask=mask)
    assert (o[0] == 0).all() and (o[1, :2] == 0).all() and (o[1, 2:] != 0).any()
    for gradient in torch.autograd.grad(o.square().sum(), inputs):
        assert gradient.isfinite().all() and (gradient[0] == 0).all()


def test_large_scores_do_not_overflow(way: str) -> None:
    q, k, v = (x.detach() for x in heads(40, 40, dtype=torch.float32))
    o = attention(q * 1e3, k * 1e3, v)
    torch.testing.assert_close(o, defined(q * 1e3, k * 1e3, v, 0, None))


def test_bfloat16_is_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_OPS", "attention=torch")
    inputs = [x.detach().bfloat16() for x in heads(30, 30, dtype=torch.float32)]
    o = attention(*inputs)
    assert o.dtype == torch.bfloat16
    exact = attention(*(x.float() for x in inputs))
    torch.testing.assert_close(o, exact.bfloat16(), rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation makes, and the number of products."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.products = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        self.products += "bmm" in str(func)
        return result


def cost(length: int, window: int) -> tuple[int, int, int]:
    """Count the numbers kept, the numbers of the largest tensor, and the matrix products."""
    kept = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    inputs = heads(length, length, b=1, h=2, g=1, d=4, dtype=torch.float32)
    with Largest() as seen:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            o = attention(*inputs, window=window)
        o.sum().backward()
    return sum(kept), seen.largest, seen.products


@pytest.mark.slow
def test_torch_attention_has_memory_linear_in_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_OPS", "attention=torch")
    monkeypatch.setattr(module, "BLOCK", 16)
    for window in (0, 20):
        kept, largest, products = cost(256, window)
        kept_longer, largest_longer, products_longer = cost(1024, window)
        assert kept < 256 * (3 * 2 * 4 + 2 * 4 + 2) and kept_longer == 4 * kept
        assert largest <= 256 * 2 * 4 and largest_longer <= 4 * largest  # no l x l tensor
        # Only the blocks in the band; each takes two products forward, and five backward.
        blocks = {0: (16 * 17 // 2, 64 * 65 // 2), 20: (1 + 2 + 14 * 3, 1 + 2 + 62 * 3)}
        assert (products, products_longer) == tuple(7 * one for one in blocks[window])


def test_dropout_is_the_same_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_OPS", "attention=torch")
    monkeypatch.setattr(module, "BLOCK", 3)

    def dropped(*inputs: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attention(*inputs, dropout=0.4)

    inputs = heads(7, 7, h=2, g=1, d=2)
    assert torch.autograd.gradcheck(dropped, inputs)
    assert not torch.allclose(dropped(*inputs), attention(*inputs))


def test_dropout_drops_elsewhere_in_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_OPS", "attention=torch")
    monkeypatch.setattr(module, "BLOCK", 4)
    q, k = torch.zeros(1, 12, 1, 12), torch.zeros(1, 12, 1, 12)
    v = torch.eye(12)[None, :, None]  # makes the output equal the weights
    weights = attention(q, k, v, dropout=0.5)[0, :, 0]
    blocks = [weights[4:8, :4], weights[8:, :4], weights[8:, 4:8]]
    patterns = {tuple((block == 0).flatten().tolist()) for block in blocks}
    assert len(patterns) == 3
    dropped, alone = weights == 0, torch.tril(torch.ones(12, 12)) / torch.arange(1, 13)[:, None]
    torch.testing.assert_close(weights, (2 * alone).masked_fill(dropped, 0))


def test_dropout_keeps_the_mean_and_is_recomputed_alike(way: str) -> None:
    q, k, v = heads(150, 150, dtype=torch.float32)
    torch.manual_seed(1)
    o = attention(q, k, torch.ones_like(v), dropout=0.3)
    assert abs(o.mean() - 1) < 0.05 and o.std() > 0.01
    gradients = []
    for again in (False, True):
        torch.manual_seed(2)

        def run(*inputs: Tensor) -> Tensor:
            return attention(*inputs, dropout=0.3)

        o = checkpoint(run, q, k, v, use_reentrant=False) if again else run(q, k, v)
        gradients.append(torch.autograd.grad(o.square().sum(), (q, k, v)))
    for plain, repeated in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, repeated)


@pytest.mark.parametrize("window", [0, 1, 4, 50])
@pytest.mark.parametrize("split", [(12,), (1,) * 12, (5, 1, 6), (2, 9, 1), (1, 3, 3, 5)])
def test_remembering_equals_seeing_all(way: str, window: int, split: tuple[int, ...]) -> None:
    q, k, v = (x.detach() for x in heads(12, 12))
    state = start(k, (2, 2, 6), 12, window)
    assert state["k"].shape[1] == (min(12, window) or 12)  # the window's length, and no more
    parts = zip(*(x.split(split, dim=1) for x in (q, k, v)), strict=True)
    o = torch.cat([attention_from(state, *part, window=window) for part in parts], dim=1)
    torch.testing.assert_close(o, defined(q, k, v, window, None))
    assert state["count"] == 12


def test_a_text_longer_than_the_state_is_reported() -> None:
    q, k, v = heads(5, 5)
    state = start(k, (2, 2, 6), 8, 0)
    attention_from(state, q, k, v)
    with pytest.raises(RequestError, match=r"holds 8 positions, and these are 5 and 5 more"):
        attention_from(state, q, k, v)


@pytest.mark.parametrize(("window", "way"), [(0, "sdpa"), (2, "torch"), (4, "sdpa")])
def test_on_a_cpu_a_window_is_quicker_without_sdpa(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, window: int, way: str
) -> None:
    for choice in (module.CHOICE, module.MASKED):
        monkeypatch.setattr(choice, "_chosen", {})  # each choice is reported once
    with caplog.at_level("INFO", "training.ops"):
        attention(*heads(4, 4, dtype=torch.float32), window=window)
    assert caplog.messages == [f"attention: {way} on cpu, torch.float32"]


def test_what_cannot_run_is_reported_when_it_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_OPS", "attention=flash")
    with pytest.raises(RequestError, match="attention=flash cannot run: it needs a GPU"):
        attention(*heads(4, 4))
    with pytest.raises(RequestError, match="attention=flash cannot run: it needs a GPU"):
        attention(*heads(4, 4), window=2)


@pytest.mark.parametrize(("l", "s", "window"), [(6, 6, 0), (6, 6, 3), (2, 6, 0), (2, 6, 4)])
def test_flash_is_asked_for_the_same(
    monkeypatch: pytest.MonkeyPatch,
    l: int,  # noqa: E741
    s: int,
    window: int,
) -> None:
    """A stand-in that follows flash-attn's documentation; the kernel itself needs a GPU."""

    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
    ) -> Tensor:
        # "i will only attend to keys between [i + s - l - left, i + s - l + right] inclusive"
        assert causal and not dropout_p and not deterministic
        left, right = window_size
        assert right in (0, -1)
        return defined(q, k, v, left + 1, None)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    inputs = heads(l, s)
    run = module.CHOICE.implementations["flash"].run
    torch.testing.assert_close(run(*inputs, window, None, 0.0), defined(*inputs, window, None))
    mask = padded(s, 1, 1)
    torch.testing.assert_close(run(*inputs, window, mask, 0.0), defined(*inputs, window, mask))


def test_positions_turn_pairs_and_only_their_distance_counts() -> None:
    cos, sin = angles(torch.arange(50), 8, 10000.0)
    assert cos.dtype == torch.float32 and cos.shape == (50, 8)
    torch.testing.assert_close(sin[3, 1], torch.tensor(3 * 10000.0 ** (-2 / 8)).sin())
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    qs, ks = (rotate(x.expand(1, 50, 1, 8), cos, sin)[0, :, 0] for x in (q, k))
    torch.testing.assert_close(qs.norm(dim=-1), q.norm().expand(50))
    torch.testing.assert_close(qs[7] @ ks[4], qs[40] @ ks[37])
    assert not torch.isclose(qs[7] @ ks[4], qs[7] @ ks[5])


def test_only_the_first_channels_turn() -> None:
    cos, sin = angles(torch.arange(5), 4, 10000.0)
    x = torch.randn(1, 5, 2, 10)
    y = rotate(x, cos, sin)
    torch.testing.assert_close(y[..., 4:], x[..., 4:], rtol=0, atol=0)
    torch.testing.assert_close(y[..., :4], rotate(x[..., :4], cos, sin), rtol=0, atol=0)


def test_far_positions_are_turned_exactly_in_bfloat16() -> None:
    cos, sin = angles(torch.tensor([4000, 4001]), 8, 10000.0)
    x = torch.randn(1, 2, 1, 8).bfloat16()
    y = rotate(x, cos, sin)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, rotate(x.float(), cos, sin).bfloat16(), rtol=0, atol=0)


def test_linear_scaling_puts_positions_closer() -> None:
    near = angles(torch.arange(10), 8, 10000.0)
    far = angles(4 * torch.arange(10), 8, 10000.0, RopeScaling(kind="linear", factor=4))
    for one, other in zip(near, far, strict=True):
        torch.testing.assert_close(one, other)
