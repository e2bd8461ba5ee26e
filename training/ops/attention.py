"""Causal softmax attention with grouped queries, over all earlier positions or a window of them.

    o[i] = sum over j of softmax(q[i] k[j] / sqrt(d))[j] v[j],  j <= i, and j > i - window

and, in a row of several documents, only those j in the same document as i.

Shapes: b batch, l queries, s keys, h heads of the queries, g heads of the keys (g divides h;
Ainslie et al. 2023), p = h / g, d channels of a head. The last query is at the position of the
last key: in training l = s, in generation s also counts the remembered keys.

The torch implementation follows Dao et al. 2022 ("FlashAttention"), algorithm 1: each block of
queries visits the blocks of keys, with a running maximum and a running sum for the softmax. Blocks
entirely in the future, before the window or in earlier documents are skipped. The backward pass
keeps the inputs, the output and each row's log-sum-exp, and recomputes the weights (algorithm 4).
The p heads that share keys are rows of one matrix product.

Shapes of a block: c queries, e keys, r = p c rows.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.errors import RequestError
from training.ops.dispatch import Choice, Implementation, on_gpu
from training.ops.documents import Documents
from training.ops.piece_attention import attend
from training.ops.pieces import Piece

BLOCK = 128
"""Number of queries, and of keys, in a block."""

SHORT = 512
"""Longest row, in keys, for which sdpa is faster with documents on a CPU."""

LEAST = -1e30
"""Initial running maximum: finite, so that a row without keys does not become NaN."""

log = logging.getLogger("training.ops")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int = 0,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    documents: Documents | None = None,
) -> Tensor:
    """Compute o of the equation above, for q (b, l, h, d) and k, v (b, s, g, d), l <= s.

    window: positions that a query sees, its own included; 0: all earlier ones. mask (b, s): False
    for keys that are padding. dropout: the share of the weights to drop. documents: of the keys,
    (b, s); the last l positions are the queries'. A row that sees nothing is 0.
    For a piece of rows, k and v are its own, (b, l, g, d); mask and dropout are not allowed then.
    Softmax is float32 (float64 for float64 inputs); the result (b, l, h, d) has the dtype of q.
    """
    if isinstance(documents, Piece):
        seen = functools.partial(attention, window=window, documents=documents.sight)
        return attend(seen, q, k, v, documents)  # (b, l, h, d)
    window = 0 if window >= k.shape[1] else window  # a window over all keys is none
    whole = mask is None and not window and documents is None and q.shape[1] in (1, k.shape[1])
    # On a CPU with short rows sdpa is faster, although it also computes what it hides.
    few = documents is not None and k.shape[1] <= SHORT and mask is None and not (window or dropout)
    run = (CHOICE if q.is_cuda or whole or few else MASKED)(q)
    o: Tensor = run(q, k, v, window, mask, dropout, documents)  # (b, l, h, d)
    return o


def start(like: Tensor, heads: tuple[int, int, int], length: int, window: int) -> dict[str, Tensor]:
    """Make the state of `attention_from`, for a text of at most `length` positions.

    heads is (b, g, d); keys and values have the device and dtype of `like`. With a window shorter
    than the text they are a ring buffer, with position i at i modulo the window.
    """
    b, g, d = heads
    n = min(length, window) if window else length
    return {
        "k": like.new_zeros((b, n, g, d)),
        "v": like.new_zeros((b, n, g, d)),
        "count": torch.zeros((), dtype=torch.long, device="cpu"),  # on the CPU: no wait for a GPU
    }


@torch.no_grad()
def attention_from(
    state: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, *, window: int = 0
) -> Tensor:
    """Compute `attention` for the next positions and update the state.

    q (b, l, h, d), k, v (b, l, g, d), l >= 1 -> (b, l, h, d). Raises RequestError if the text
    becomes longer than the state was made for.
    """
    count, n, l = int(state["count"]), state["k"].shape[1], k.shape[1]  # noqa: E741
    if n != window and count + l > n:
        raise RequestError(
            f"attention: the state holds {n} positions, and these are {count} and {l} more; "
            "fix: start it with a greater length"
        )
    keys, values = state["k"], state["v"]  # (b, n, g, d)
    if count + l > n and l > 1:
        # Several new positions need the old keys in order, and before they are overwritten.
        past = torch.arange(max(0, count - n), count, device=k.device) % n  # (<= n,)
        keys = torch.cat((keys[:, past], k), dim=1)  # (b, s, g, d)
        values = torch.cat((values[:, past], v), dim=1)  # (b, s, g, d)
    slots = torch.arange(max(count, count + l - n), count + l, device=k.device) % n  # (<= l,)
    state["k"][:, slots] = k[:, -n:]  # (b, <= l, g, d)
    state["v"][:, slots] = v[:, -n:]  # (b, <= l, g, d)
    if keys is state["k"]:
        # Only the filled part. A single position sees all of it, in whatever order.
        keys, values = keys[:, : count + l], values[:, : count + l]  # (b, s, g, d)
    state["count"] += l
    return attention(q, keys, values, window=window)  # (b, l, h, d)


class _Blocks:
    """The inputs, in float32 or wider, a block at a time: bfloat16 is never widened as a whole."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int,
        mask: Tensor | None,
        dropout: float,
        documents: Documents | None,
        seed: int,
    ) -> None:
        self.q, self.k, self.v, self.window, self.mask = q, k, v, window, mask
        self.dropout, self.documents, self.seed = dropout, documents, seed
        self.work = torch.promote_types(q.dtype, torch.float32)
        self.past = k.shape[1] - q.shape[1]  # keys before the first query's own
        self.scale = 1 / math.sqrt(q.shape[-1])

    def rows(self, x: Tensor, at: int) -> Tensor:
        """(b, l, h, d) -> the block that starts at `at`, (b, g, r, d)."""
        block = x[:, at : at + BLOCK].unflatten(2, (self.k.shape[2], -1))  # (b, c, g, p, d)
        return block.permute(0, 2, 3, 1, 4).flatten(2, 3).to(self.work)  # (b, g, r, d)

    def unrowed(self, block: Tensor) -> Tensor:
        """(b, g, r, d) -> (b, c, h, d)."""
        p = self.q.shape[2] // self.k.shape[2]
        return block.unflatten(2, (p, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)  # (b, c, h, d)

    def keys(self, x: Tensor, at: int) -> Tensor:
        """(b, s, g, d) -> the block that starts at `at`, (b, g, e, d)."""
        return x[:, at : at + BLOCK].transpose(1, 2).to(self.work)  # (b, g, e, d)

    def seen(self, at: int) -> Iterator[int]:
        """Yield the start of each block of keys that some query of the block at `at` sees."""
        first = self.past + at  # the position of the first query
        begin = max(0, first - self.window + 1) if self.window else 0
        if self.documents is not None:
            begin = max(begin, self.documents.first_key(first))
        return iter(range(begin, min(first + BLOCK, self.k.shape[1]), BLOCK))

    def scores(self, q: Tensor, k: Tensor, at: int, to: int) -> Tensor:
        """Score scaled q (b, g, r, d) with k (b, g, e, d): (b, g, r, e), -inf where hidden."""
        scores = q @ k.transpose(2, 3)  # (b, g, r, e)
        c, e = min(BLOCK, self.q.shape[1] - at), k.shape[2]
        behind = self.past + at - to  # from the first key to the first query
        hidden = None
        if behind < e - 1 or (self.window and behind + c > self.window):
            rows = torch.arange(behind, behind + c, device=q.device)[:, None]  # (c, 1)
            distance = rows - torch.arange(e, device=q.device)  # (c, e)
            hidden = distance < 0  # (c, e)
            if self.window:
                hidden = hidden | (distance >= self.window)  # (c, e)
        at += self.past
        if self.documents is not None and self.documents.is_cut(to, at + c):
            numbers = self.documents.seq_idx  # (b, s)
            others = numbers[:, at : at + c, None] != numbers[:, None, to : to + e]  # (b, c, e)
            others = others[:, None, None]  # (b, 1, 1, c, e)
            hidden = others if hidden is None else hidden | others  # (b, 1, 1, c, e)
        if self.mask is not None:
            padding = ~self.mask[:, None, None, None, to : to + e]  # (b, 1, 1, 1, e)
            hidden = padding if hidden is None else hidden | padding  # (b, 1, 1, c, e)
        if hidden is not None:
            scores.unflatten(2, (-1, c)).masked_fill_(hidden, -math.inf)  # (b, g, p, c, e)
        return scores

    def kept(self, like: Tensor, at: int, to: int) -> Tensor | None:
        """Return dropout's factors on the weights (b, g, r, e), the same in both passes."""
        if not self.dropout:
            return None
        # A generator per pair of blocks: the backward pass may visit them in any order.
        pair = (at * self.k.shape[1] + to) // BLOCK
        source = torch.Generator(like.device).manual_seed(self.seed + pair)
        chance = torch.rand(like.shape, generator=source, device=like.device)  # (b, g, r, e)
        return (chance >= self.dropout).to(like.dtype) / (1 - self.dropout)  # (b, g, r, e)


class _Attention(torch.autograd.Function):
    """The torch implementation."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int,
        mask: Tensor | None,
        dropout: float,
        documents: Documents | None,
    ) -> Tensor:
        # Drawn from the generator that recomputation restores.
        seed = int(torch.randint(1 << 40, ())) if dropout else 0
        blocks = _Blocks(q, k, v, window, mask, dropout, documents, seed)
        o = torch.empty_like(q)  # (b, l, h, d)
        sums = []
        for at in range(0, q.shape[1], BLOCK):
            rows = blocks.rows(q, at) * blocks.scale  # (b, g, r, d)
            top = rows.new_full((*rows.shape[:-1], 1), LEAST)  # (b, g, r, 1)
            total, o_rows = torch.zeros_like(top), torch.zeros_like(rows)  # (b, g, r, 1 | d)
            for to in blocks.seen(at):
                weights = blocks.scores(rows, blocks.keys(k, to), at, to)  # (b, g, r, e)
                higher = torch.maximum(top, weights.amax(-1, keepdim=True))  # (b, g, r, 1)
                weights = weights.sub_(higher).exp_()  # (b, g, r, e)
                fade = torch.exp(top - higher)  # (b, g, r, 1)
                total = total.mul_(fade).add_(weights.sum(-1, keepdim=True))  # (b, g, r, 1)
                kept = blocks.kept(weights, at, to)
                weights = weights if kept is None else weights * kept  # (b, g, r, e)
                o_rows = o_rows.mul_(fade).add_(weights @ blocks.keys(v, to))  # (b, g, r, d)
                top = higher
            empty = total == 0  # (b, g, r, 1)
            o_rows = o_rows / total.masked_fill(empty, 1)  # (b, g, r, d)
            o[:, at : at + BLOCK] = blocks.unrowed(o_rows)  # (b, c, h, d)
            # An infinite sum makes all weights of a row without keys 0 in the backward pass.
            sums.append((top + total.log()).masked_fill(empty, math.inf))  # (b, g, r, 1)
        ctx.save_for_backward(q, k, v, mask, o, *sums)
        ctx.how = window, dropout, documents, seed
        return o  # (b, l, h, d)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, mask, o, *sums = ctx.saved_tensors
        window, dropout, documents, seed = ctx.how
        blocks = _Blocks(q, k, v, window, mask, dropout, documents, seed)
        dq = torch.empty_like(q)  # (b, l, h, d)
        b, s, g, d = k.shape
        dk, dv = (q.new_zeros((b, g, s, d), dtype=blocks.work) for _ in range(2))  # (b, g, s, d)
        for index, at in enumerate(range(0, q.shape[1], BLOCK)):
            rows = blocks.rows(q, at) * blocks.scale  # (b, g, r, d)
            do_rows = blocks.rows(do, at)  # (b, g, r, d)
            # The softmax's own term, sum over j of weight dweight, is o do.
            along = (do_rows * blocks.rows(o, at)).sum(-1, keepdim=True)  # (b, g, r, 1)
            dq_rows = torch.zeros_like(rows)  # (b, g, r, d)
            for to in blocks.seen(at):
                cut = slice(to, to + BLOCK)
                k_block = blocks.keys(k, to)  # (b, g, e, d)
                weights = blocks.scores(rows, k_block, at, to)  # (b, g, r, e)
                weights = weights.sub_(sums[index]).exp_()  # (b, g, r, e)
                dweights = do_rows @ blocks.keys(v, to).transpose(2, 3)  # (b, g, r, e)
                kept = blocks.kept(weights, at, to)
                used = weights if kept is None else weights * kept  # (b, g, r, e)
                dweights = dweights if kept is None else dweights.mul_(kept)  # (b, g, r, e)
                dv[:, :, cut] += used.transpose(2, 3) @ do_rows  # (b, g, e, d)
                dscores = dweights.sub_(along).mul_(weights)  # (b, g, r, e)
                dq_rows += dscores @ k_block  # (b, g, r, d)
                dk[:, :, cut] += dscores.transpose(2, 3) @ rows  # (b, g, e, d)
            dq[:, at : at + BLOCK] = blocks.unrowed(dq_rows * blocks.scale)  # (b, c, h, d)
        dk, dv = dk.transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype)  # (b, s, g, d)
        return dq, dk, dv, None, None, None, None


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    mask: Tensor | None,
    dropout: float,
    documents: Documents | None,
) -> Tensor:
    """PyTorch's own scaled_dot_product_attention, which chooses among its kernels."""
    l, s = q.shape[1], k.shape[1]  # noqa: E741
    p = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (b, h or g, l or s, d)
    # Repeat keys and values for each query head: torch 2.2 has no grouped queries.
    k, v = (x[:, :, None].expand(-1, -1, p, -1, -1).flatten(1, 2) for x in (k, v))  # (b, h, s, d)
    run = functools.partial(F.scaled_dot_product_attention, q, k, v, dropout_p=dropout)
    if mask is None and not window and documents is None and l in (1, s):
        # A single query sees every key; with l = s, the kernels' own causal mask is right.
        return run(is_causal=l > 1).transpose(1, 2)  # (b, l, h, d)
    seen = _near(l, s, window, q.device)  # (l, s)
    if documents is not None:
        seen = documents.once(
            ("attention", window), lambda: _same(documents, l) & seen
        )  # (b, 1, l, s)
    if mask is None:
        return run(attn_mask=seen).transpose(1, 2)  # (b, l, h, d)
    seen = seen & mask[:, None, None, :]  # (b, 1, l, s)
    # Some kernels return NaN for a row that sees nothing: let it see all, then set it to 0.
    empty = ~seen.any(-1, keepdim=True)  # (b, 1, l, 1)
    return run(attn_mask=seen | empty).masked_fill(empty, 0).transpose(1, 2)  # (b, l, h, d)


def _near(l: int, s: int, window: int, device: torch.device) -> Tensor:  # noqa: E741
    """Return what the last l of s positions see, (l, s), bool: earlier ones within the window."""
    rows = torch.arange(s - l, s, device=device)[:, None]  # (l, 1)
    distance = rows - torch.arange(s, device=device)  # (l, s)
    seen = distance >= 0  # (l, s)
    return seen & (distance < window) if window else seen  # (l, s)


def _same(documents: Documents, l: int) -> Tensor:  # noqa: E741
    """Return which positions share a document with the last l, (b, 1, l, s), bool."""
    numbers = documents.seq_idx  # (b, s)
    return (numbers[:, -l:, None] == numbers[:, None, :])[:, None]  # (b, 1, l, s)


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    mask: Tensor | None,
    dropout: float,
    documents: Documents | None = None,
) -> Tensor:
    """flash-attn's CUDA kernel (2.4.1 or later); leaves padding and large heads to sdpa."""
    if mask is not None or q.shape[-1] > 256:
        _tell("padding" if mask is not None else "heads of more than 256 channels")
        return _sdpa(q, k, v, window, mask, dropout, documents)  # (b, l, h, d)
    how: dict[str, Any] = {
        "dropout_p": dropout,
        "causal": True,
        "window_size": (window - 1, 0) if window else (-1, -1),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if documents is None:
        from flash_attn import flash_attn_func

        o: Tensor = flash_attn_func(q, k, v, **how)  # (b, l, h, d)
        return o
    from flash_attn import flash_attn_varlen_func

    ends, longest = documents.cu_seqlens, documents.longest  # (n + 1,)
    own = documents.last_seqlens(q.shape[1])  # (n + 1,)
    o = flash_attn_varlen_func(
        *(one.flatten(0, 1) for one in (q, k, v)), own, ends, longest, longest, **how
    )  # (b l, h, d)
    return o.unflatten(0, q.shape[:2])  # (b, l, h, d)


@functools.lru_cache
def _tell(what: str) -> None:
    log.info("attention: sdpa for %s, which flash does not take", what)


def _unfit_for_flash(like: Tensor) -> str:
    if on_gpu(like):
        return on_gpu(like)
    if like.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, but the tensors are {like.dtype}"
    if torch.cuda.get_device_capability(like.device) < (8, 0):
        return "it needs an Ampere GPU or a later one"
    return ""


_FLASH = Implementation(name="flash", run=_flash, module="flash_attn", unfit=_unfit_for_flash)
_SDPA = Implementation(name="sdpa", run=_sdpa)
_TORCH = Implementation(name="torch", run=_Attention.apply)

CHOICE = Choice("attention", [_FLASH, _SDPA, _TORCH])

MASKED = Choice("attention", [_FLASH, _TORCH, _SDPA])
"""On a CPU with a window, padding, documents in longer rows, or keys before the queries: sdpa is
slower there, as it also computes what is hidden."""
