"""Rows of several documents, and the same documents each alone, which must not differ.

Shapes: b batch, l length, v vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.training.support.families import HYBRIDS
from training.models import (
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    NeoXConfig,
    Sizes,
    preset,
)

VOCABULARY = 61
WITHIN = 1e-6
"""Tolerance of a logit or gradient in float32, relative to the largest if that is above 1."""

_LLAMA: dict[str, Any] = {
    **{"d_model": 32, "n_layer": 2, "vocab_size": VOCABULARY},
    **{"n_head": 4, "n_kv_head": 2, "d_ff": 48},
}
_MAMBA2: dict[str, Any] = {
    **{"d_model": 32, "n_layer": 2, "vocab_size": VOCABULARY},
    **{"d_state": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
}
_HYBRID: dict[str, Any] = {
    **{"d_model": 32, "vocab_size": VOCABULARY, "d_ff": 48, "n_mamba_head": 4},
    **{"mamba_head_dim": 16, "d_state": 8, "chunk_size": 8},
}
FAMILIES: dict[str, Sizes] = {
    "mamba": MambaConfig(d_model=32, n_layer=2, vocab_size=VOCABULARY, d_state=8),
    "mamba2": Mamba2Config(**_MAMBA2),
    "llama": LlamaConfig(**_LLAMA),
    "mistral": MistralConfig(**_LLAMA, window=5),
    "mixtral": MixtralConfig(**_LLAMA, n_expert=4),
    "gpt_neox": NeoXConfig(d_model=32, n_layer=2, vocab_size=VOCABULARY, n_head=4, d_ff=64),
    # Sized like their tiny presets, with as few channels as the others.
    **{name.removesuffix("-tiny"): replace(preset(name), **_HYBRID) for name in HYBRIDS},
}


def cut(random: torch.Generator, length: int, most: int) -> list[int]:
    """Draw the lengths of the documents in a row, from 1 to `most` each."""
    found: list[int] = []
    while (left := length - sum(found)) > 0:
        found.append(min(left, int(torch.randint(1, most + 1, (), generator=random))))
    return found


def rows(length: int) -> st.SearchStrategy[list[list[int]]]:
    """Draw the lengths of the documents in two rows of the same length; many have length 1."""
    ends = (
        st.sets(st.integers(1, length - 1), max_size=length - 1) if length > 1 else st.just(set())
    )
    return st.lists(ends.map(lambda some: lengths(sorted(some), length)), min_size=2, max_size=2)


def lengths(ends: Sequence[int], length: int) -> list[int]:
    bounds = [0, *ends, length]
    return [end - begin for begin, end in pairwise(bounds)]


def numbers(given: Sequence[Sequence[int]]) -> Tensor:
    """Return seq_idx (b, l) for rows of documents of these lengths."""
    return torch.tensor(
        [[at for at, one in enumerate(row) for _ in range(one)] for row in given],
        dtype=torch.int32,
    )


def places(given: Sequence[Sequence[int]]) -> list[tuple[int, slice]]:
    """Return where each document lies: its row, and its steps there."""
    found = []
    for number, row in enumerate(given):
        at = 0
        for one in row:
            found.append((number, slice(at, at + one)))
            at += one
    return found


def tokens(given: Sequence[Sequence[int]], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets (b, l) of such rows; a document's last target begins the next one."""
    random = torch.Generator().manual_seed(seed)
    shape = len(given), sum(given[0]) + 1
    ids = torch.randint(VOCABULARY, shape, generator=random)  # (b, l + 1)
    return ids[:, :-1], ids[:, 1:]


Outcome = tuple[Tensor, dict[str, Tensor]]
"""Logits (b, l, v), and the gradients by name."""


def alone(
    model: nn.Module, given: Sequence[Sequence[int]], seed: int = 0, total: float = 1.0
) -> Outcome:
    """Run each document by itself; gradients are of the sum of all losses, over `total`.

    Documents of the same length run together, as rows of a batch.
    """
    inputs, targets = tokens(given, seed)
    found: dict[tuple[int, int], Tensor] = {}
    of_length: dict[int, list[tuple[int, slice]]] = {}
    for row, steps in places(given):
        of_length.setdefault(steps.stop - steps.start, []).append((row, steps))
    model.zero_grad()
    for alike in of_length.values():
        part = [torch.stack([one[row, steps] for row, steps in alike]) for one in (inputs, targets)]
        with torch.no_grad():
            logits = model(part[0])  # (documents, length, v)
        found |= {(row, steps.start): one for (row, steps), one in zip(alike, logits, strict=True)}
        model(*part, total=torch.tensor(total)).backward()
    in_order = [found[place] for place in sorted(found)]  # (length, v) each
    return torch.cat(in_order).unflatten(0, inputs.shape), gradients(model)


def together(
    model: nn.Module, given: Sequence[Sequence[int]], seed: int = 0, total: float = 1.0
) -> Outcome:
    """Run the rows as they are, with seq_idx to say where documents begin."""
    inputs, targets = tokens(given, seed)
    seq_idx = numbers(given)  # (b, l)
    model.zero_grad()
    with torch.no_grad():
        logits = model(inputs, seq_idx=seq_idx)  # (b, l, v)
    model(inputs, targets, total=torch.tensor(total), seq_idx=seq_idx).backward()
    return logits, gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
    }


def difference(found: Outcome, wanted: Outcome) -> float:
    """Return the largest difference, relative to a tensor's largest number if that is above 1."""
    assert found[1].keys() == wanted[1].keys()
    pairs = [(found[0], wanted[0]), *((found[1][name], wanted[1][name]) for name in wanted[1])]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)
