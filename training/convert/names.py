"""What the tensors of a model are called in each format, and how they lie in our parameters.

Shapes: e experts, f width of an expert, m d_model.

Our names are Hugging Face's, except Mixtral's experts: stacked, `model.layers.N.mlp.experts.w1` and
`.w3` (e, f, m) and `.w2` (e, m, f), and their router `model.layers.N.mlp.gate.weight` (e, m). In
Hugging Face's files each expert has three tensors of its own under `block_sparse_moe`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training.models import Sizes, build

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, and the parameter that it is, or is one expert's part of."""

    name: str
    shape: Shape
    parameter: str
    expert: int | None = None


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model; `tied`: second names -> the first, of one shape and value."""

    shapes: dict[str, Shape]
    tied: dict[str, str]

    @classmethod
    def of(cls, sizes: Sizes) -> Parameters:
        """Ask the model itself, without making a value."""
        with torch.device("meta"):
            model = build(sizes)
        return cls({n: tuple(p.shape) for n, p in model.named_parameters()}, model.tied)


def layout(form: str, sizes: Sizes, parameters: Parameters) -> list[Stored]:
    """List what a format stores of a model, in the order of the parameters."""
    return [
        stored
        for name, shape in parameters.shapes.items()
        for stored in _stored(form, sizes.family, name, shape)
    ]


def doubles(parameters: Parameters) -> list[Stored]:
    """List the tied tensors once more, under their second names; state-spaces stores both."""
    return [
        Stored(second, parameters.shapes[first], first) for second, first in parameters.tied.items()
    ]


def _stored(form: str, family: str, name: str, shape: Shape) -> list[Stored]:
    if form == "state-spaces":
        return [Stored(name.replace("backbone.embeddings.", "backbone.embedding."), shape, name)]
    if form == "hf" and family == "mixtral" and ".mlp." in name:
        theirs = name.replace(".mlp.", ".block_sparse_moe.")
        before, experts, last = theirs.partition(".experts.")
        if not experts:
            return [Stored(theirs, shape, name)]
        return [
            Stored(f"{before}.experts.{index}.{last}.weight", shape[1:], name, index)
            for index in range(shape[0])
        ]
    return [Stored(name, shape, name)]
