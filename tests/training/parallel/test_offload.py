"""Activations in another memory: what leaves, when it returns, and that nothing changes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.support.families import PRESETS, filled
from training.models import HybridConfig, preset
from training.models.language import LanguageModel
from training.parallel.offload import Offload, Wait

BLOCKS, LEAST = 5, 4096


class OtherMemory:
    """Stands in for the host's memory: copies are made at once, and recorded."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.there: list[Tensor] = []
        self.fetched_at: list[int] = []  # for each fetch, blocks already in the backward pass
        self.waits: list[tuple[int, int]] = []
        """For each wait until copies have left: how many it waits for, and how many there are."""
        self.backward_of = 0

    def send(self, here: Tensor) -> Tensor:
        self.there.append(here.clone())
        return self.there[-1]

    def sent(self) -> Wait:
        count = len(self.there)
        return lambda: self.waits.append((count, len(self.there)))

    def fetch(self, there: Tensor) -> Tensor:
        self.fetched_at.append(self.backward_of)
        return there.clone()

    def fetched(self) -> Wait:
        return lambda: None


def model_of(name: str, recompute: bool = False) -> LanguageModel:
    sizes: Any = preset(name)
    layers: dict[str, Any] = {"n_layer": BLOCKS}
    if isinstance(sizes, HybridConfig):
        layers["pattern"] = (sizes.pattern * BLOCKS)[:BLOCKS]
    model = filled(type(sizes)(**{**vars(sizes), **layers}))
    for block in model.blocks:
        block.recompute = recompute
    return model


def gradients(model: LanguageModel) -> list[Tensor]:
    tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(1))  # (b, l)
    for _ in range(2):  # gradient accumulation: one pass after the other
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_gradients_are_the_same_to_the_bit(name: str, recompute: bool) -> None:
    expected = gradients(model_of(name, recompute))
    model, memory = model_of(name, recompute), OtherMemory()
    Offload(memory, horizon=2, least=LEAST).attach(model.blocks)
    for one, other in zip(gradients(model), expected, strict=True):
        assert torch.equal(one, other)
    assert len(memory.fetched_at) == len(memory.there) > 0, "all that left came back, once"


def test_parameters_stay_and_a_storage_leaves_once() -> None:
    """What leaves a block is what it made: 12 storages, seen by some 30 saved tensors."""
    model, memory = model_of("llama-tiny"), OtherMemory()
    Offload(memory, horizon=4, least=LEAST).attach(model.blocks)  # only one block's leave
    weights = {one.untyped_storage().nbytes() for one in model.blocks[0].parameters()}
    tokens = torch.zeros(2, 24, dtype=torch.long)  # (b, l)
    model(tokens, tokens)
    sent = [one.numel() for one in memory.there]
    assert not weights & set(sent)
    stream, wide = 2 * 24 * 128 * 4, 2 * 24 * 352 * 4  # (b, l, d_model), (b, l, f), float32
    assert sorted(sent) == [stream] * 8 + [wide] * 4


def test_a_recomputed_block_sends_its_input_only() -> None:
    model, memory = model_of("llama-tiny", recompute=True), OtherMemory()
    Offload(memory, horizon=1, least=LEAST).attach(model.blocks)
    tokens = torch.zeros(2, 24, dtype=torch.long)  # (b, l)
    model(tokens, tokens)
    assert [one.numel() for one in memory.there] == [2 * 24 * 128 * 4] * (BLOCKS - 1)
    # A block is released when the next one is done, without waiting for what that one sends.
    assert memory.waits == [(1, 2), (2, 3), (3, 4), (4, 4)]


@pytest.mark.parametrize("horizon", [1, 2, 3])
def test_a_block_is_fetched_a_horizon_ahead(horizon: int) -> None:
    """Those of the last blocks, which would return at once, never leave."""
    model, memory = model_of("llama-tiny", recompute=True), OtherMemory()
    Offload(memory, horizon, least=LEAST).attach(model.blocks)

    def count(module: Any, gradient: Any) -> None:
        memory.backward_of += 1

    for block in model.blocks:
        block.register_full_backward_pre_hook(count)
    tokens = torch.zeros(2, 24, dtype=torch.long)  # (b, l)
    model(tokens, tokens).backward()
    assert len(memory.there) == BLOCKS - horizon
    # The n-th block of the backward pass starts to fetch the (n + horizon)-th.
    assert memory.fetched_at == [n + 1 for n in range(BLOCKS - horizon)]


def test_nothing_is_held_after_the_backward_pass() -> None:
    model, memory = model_of("llama-tiny"), OtherMemory()
    Offload(memory, horizon=1, least=LEAST).attach(model.blocks)
    tokens = torch.zeros(2, 24, dtype=torch.long)  # (b, l)
    loss = model(tokens, tokens)
    held = [weakref.ref(one) for one in memory.there]
    memory.there.clear()
    assert all(one() is not None for one in held)
    loss.backward()
    del loss
    assert all(one() is None for one in held)


def test_a_second_backward_pass_brings_everything_back_again() -> None:
    model, memory = model_of("llama-tiny"), OtherMemory()
    Offload(memory, horizon=1, least=LEAST).attach(model.blocks)
    tokens = torch.zeros(2, 24, dtype=torch.long)  # (b, l)
    loss = model(tokens, tokens)
    loss.backward(retain_graph=True)
    first = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    loss.backward()
    for one, parameter in zip(first, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, 2 * one)


def test_evaluation_sends_nothing() -> None:
    model, memory = model_of("llama-tiny"), OtherMemory()
    Offload(memory, horizon=1, least=LEAST).attach(model.blocks)
    with torch.no_grad():
        model(torch.zeros(2, 24, dtype=torch.long))
    assert not memory.there
