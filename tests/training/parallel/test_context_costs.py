"""What ranks that share sequences send and keep: the formulas, and docs/training/parallel.md."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.training.support.context_costs import BATCH, LENGTH, NAMES, sizes_of
from tests.training.support.runs import run
from training.models import (
    HybridConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MixtralConfig,
    Sizes,
)
from training.models.hybrid_sizes import ATTENTION, MAMBA

pytestmark = pytest.mark.processes

FLOAT = 4  # bytes of a number in float32


def sent(sizes: Sizes, ranks: int, rank: int) -> int:
    """Return the bytes that a rank sends in a step, by the formulas."""
    if isinstance(sizes, HybridConfig):
        mamba = sizes.pattern.count(MAMBA) * of_state(sizes.mamba, ranks, rank)
        return mamba + sizes.pattern.count(ATTENTION) * of_attention(sizes.attention, ranks)
    if isinstance(sizes, LlamaConfig):
        loads = 2 * 2 * sizes.n_expert * FLOAT if isinstance(sizes, MixtralConfig) else 0
        return sizes.n_layer * of_attention(sizes, ranks) + loads
    assert isinstance(sizes, MambaConfig | Mamba2Config)
    return sizes.n_layer * of_state(sizes, ranks, rank)


def of_state(sizes: MambaConfig | Mamba2Config, ranks: int, rank: int) -> int:
    """For a layer of Mamba-1 or Mamba-2: forward to later ranks, backward to earlier ones."""
    if isinstance(sizes, Mamba2Config):
        channels, numbers = sizes.d_conv_in, sizes.d_inner * sizes.d_state + sizes.n_head
    else:
        channels, numbers = sizes.d_inner, sizes.d_inner * sizes.d_state + sizes.d_inner
    tails = (rank + 1 < ranks) + (rank > 0)
    rounds = [2**one for one in range((ranks - 1).bit_length())]  # ceil(log2 N) of them
    states = sum((rank + far < ranks) + (rank >= far) for far in rounds)
    return BATCH * FLOAT * (tails * (sizes.d_conv - 1) * channels + states * numbers)


def of_attention(sizes: LlamaConfig, ranks: int) -> int:
    """For a layer of attention: keys and values twice, and their gradients once, to all others."""
    longest = -(-LENGTH // ranks)
    return 3 * (ranks - 1) * 2 * BATCH * longest * sizes.n_kv_head * sizes.d_head * FLOAT


def test_each_rank_sends_what_the_formulas_say_and_keeps_a_share() -> None:
    kept: dict[str, dict[int, int]] = {name: {} for name in NAMES}
    for ranks in (1, 2, 3, 4):
        done = run(ranks, program=("-m", "tests.training.support.context_costs"), timeout=600)
        assert done.returncode == 0, done.stderr
        found: list[Any] = [json.loads(line) for line in done.stdout.splitlines()]
        assert [one["name"] for one in found] == list(NAMES)
        for one in found:
            sizes = sizes_of(one["name"])
            assert one["sent"] == [sent(sizes, ranks, rank) for rank in range(ranks)]
            kept[one["name"]][ranks] = one["kept"]
    for name, by_ranks in kept.items():
        for ranks in (2, 3, 4):
            assert by_ranks[ranks] <= 1.02 * by_ranks[1] / ranks, name
