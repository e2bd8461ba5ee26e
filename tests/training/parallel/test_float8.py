"""Where linear layers compute in float8, and the message where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from training.config.config import ParallelConfig
from training.parallel import float8


def test_float8_is_reported_to_be_off_where_it_cannot_be() -> None:
    wanted = ParallelConfig(fp8=True)
    bf16, fp32 = torch.bfloat16, torch.float32
    shared = ParallelConfig(fp8=True, tensor_parallel=2)
    old = ParallelConfig(fp8=True, fsdp_engine="fsdp1")
    cases: list[tuple[Any, str]] = [
        ((wanted, bf16, None, True), "this is not a GPU"),
        ((wanted, bf16, (8, 0), True), "this GPU has compute capability 8.0, but it needs 8.9"),
        ((wanted, fp32, (9, 0), True), "the blocks compute in float32"),
        ((shared, bf16, (9, 0), True), "2 ranks share each layer"),
        ((old, bf16, (9, 0), True), "this is FSDP1"),
    ]
    for arguments, shown in cases:
        assert float8.obstacle(*arguments).startswith(shown)
    assert float8.fits(torch.nn.Linear(32, 48), "") and not float8.fits(torch.nn.Linear(32, 50), "")


@pytest.mark.fsdp2
def test_float8_is_on_where_it_can_be() -> None:
    wanted = ParallelConfig(fp8=True)
    assert float8.obstacle(wanted, torch.bfloat16, (8, 9), True) == ""
    assert float8.obstacle(wanted, torch.bfloat16, (9, 0), False).startswith("the library torchao")
