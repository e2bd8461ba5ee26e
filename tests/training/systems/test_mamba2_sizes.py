"""The models that the Mamba-2 system for Neuron knows by name."""

from __future__ import annotations

import pytest

from training.errors import RequestError
from training.models import parameters
from training.systems.mamba2 import MODELS, sizes


def test_the_largest_has_the_known_number_of_parameters() -> None:
    d, inner, heads, layers = 4096, 8192, 64, 64
    conv = inner + 2 * 8 * 128
    layer = d * (inner + conv + heads) + 5 * conv + 3 * heads + inner + inner * d + d
    found = parameters(sizes("Mamba7B", vocab_size=50288, n_groups=8))
    assert found == layers * layer + 50288 * d + d == 7_206_158_336


@pytest.mark.parametrize("name", MODELS)
def test_every_name_is_a_model(name: str) -> None:
    made = sizes(name, vocab_size=50272, n_groups=1, norm_across_groups=True)
    assert (made.head_dim, made.d_state, made.d_conv, made.expand) == (128, 128, 4, 2)
    assert made.tie_embeddings and made.norm_across_groups and made.vocab_size == 50272
    size = float(name.removeprefix("Mamba")[:-1]) * (1e6 if name.endswith("M") else 1e9)
    assert 0.7 * size < parameters(made) < 1.5 * size


def test_what_is_no_model_of_the_system() -> None:
    with pytest.raises(RequestError, match=r"no model is called 'Mamba7b'; did you mean Mamba7B\?"):
        sizes("Mamba7b", vocab_size=50288, n_groups=8)
    with pytest.raises(RequestError, match="n_groups: 8 does not divide the 12 heads"):
        sizes("Mamba130M", vocab_size=50288, n_groups=8)
