"""Every family on rows of several documents: logits and gradients of each document alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings

from tests.training.support.documents import (
    FAMILIES,
    VOCABULARY,
    WITHIN,
    alone,
    cut,
    difference,
    numbers,
    rows,
    together,
    tokens,
)
from tests.training.support.families import filled
from training.models import LlamaConfig, RopeScaling
from training.ops import ssd as ssd_module

LENGTHS = [[5, 1, 20, 6], [32]]
"""Boundaries on and off the edges of chunks of 8 and 32, a document of one token, a row of one."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_each_document_alone(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(ssd_module, "CPU_CHUNK", 8)
    model = filled(FAMILIES[name])

    @settings(max_examples=12, deadline=None)
    @given(rows(33))
    def each(lengths: Sequence[Sequence[int]]) -> None:
        assert difference(together(model, lengths), alone(model, lengths)) <= WITHIN

    each()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("chunk", [8, 32])
def test_boundaries_on_the_edges_of_chunks(
    monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    monkeypatch.setattr(ssd_module, "CPU_CHUNK", chunk)
    model = filled(FAMILIES[name])
    for lengths in ([[8, 24], [24, 8]], [[32], [31, 1]], [[1] * 32, [1, 31]], LENGTHS):
        assert difference(together(model, lengths), alone(model, lengths)) <= WITHIN, lengths


@pytest.mark.parametrize("name", FAMILIES)
def test_without_the_switch_a_document_leaks_into_the_next(name: str) -> None:
    """By far more than the equality tests tolerate."""
    model = filled(FAMILIES[name])
    inputs, _ = tokens(LENGTHS)
    wanted, _ = alone(model, LENGTHS)
    with torch.no_grad():
        leaking = model(inputs)
        changed = inputs.clone()
        changed[0, :5] = (changed[0, :5] + 1) % VOCABULARY  # the first document of the first row
        after = model(changed)
        apart = [model(one, seq_idx=numbers(LENGTHS)) for one in (inputs, changed)]
    assert (leaking - wanted)[0, 6:26].abs().max() > 1000 * WITHIN
    assert (after - leaking)[0, 6:9].abs().max() > 100 * WITHIN
    assert torch.equal(apart[0][0, 5:], apart[1][0, 5:])  # not one bit passes
    torch.testing.assert_close(leaking[1], wanted[1])  # a row of one document is unchanged


@pytest.mark.parametrize("name", FAMILIES)
def test_recomputation_changes_no_bit(name: str) -> None:
    found = []
    for recompute in (False, True):
        model = filled(FAMILIES[name])
        for block in model.blocks:
            block.recompute = recompute
        found.append(together(model, LENGTHS))
    for name_, one in found[0][1].items():
        assert torch.equal(one, found[1][1][name_]), name_


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_neox"])
def test_attention_by_sdpa(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It uses a block mask, as a GPU without flash-attn does with any torch."""
    monkeypatch.setenv("TRAINING_OPS", "attention=sdpa")
    model = filled(FAMILIES[name])
    assert difference(together(model, LENGTHS), alone(model, LENGTHS)) <= WITHIN


@pytest.mark.slow
def test_long_rows_of_the_real_chunk() -> None:
    """Chunks of 64 and 32 steps, blocks of 128, documents of 1 to 90 tokens."""
    random = torch.Generator().manual_seed(2)
    lengths = [cut(random, 300, 90) for _ in range(2)]
    for name, sizes in FAMILIES.items():
        model = filled(sizes)
        # Use the mean: reordered sums of 600 gradients differ by more than the tolerance of one.
        found, wanted = (run(model, lengths, total=600.0) for run in (together, alone))
        assert difference(found, wanted) <= WITHIN, name


def test_scaled_positions_begin_anew_too() -> None:
    """For kinds whose angles do not depend on the length, which differs for a document alone."""
    sizes = {"d_model": 32, "n_layer": 2, "vocab_size": VOCABULARY, "n_head": 4, "n_kv_head": 2}
    scalings = (
        RopeScaling(kind="linear", factor=4.0),
        RopeScaling(kind="llama3", factor=4.0, original_context=16),
        RopeScaling(kind="yarn", factor=4.0, original_context=16),
    )
    for scaling in scalings:
        model = filled(LlamaConfig(**sizes, d_ff=48, rope_scaling=scaling))  # type: ignore[arg-type]
        assert difference(together(model, LENGTHS), alone(model, LENGTHS)) <= WITHIN, scaling.kind


def test_bfloat16_follows_float32() -> None:
    for name, sizes in FAMILIES.items():
        wide, narrow = filled(sizes), filled(sizes).bfloat16()
        inputs, targets = tokens(LENGTHS)
        losses = [one(inputs, targets, seq_idx=numbers(LENGTHS)) for one in (wide, narrow)]
        losses[1].backward()
        torch.testing.assert_close(losses[1].float(), losses[0], rtol=0.02, atol=0.02, msg=name)
        assert all(one.grad.isfinite().all() for one in narrow.parameters())  # type: ignore[union-attr]
