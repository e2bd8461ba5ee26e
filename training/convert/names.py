"""What the tensors of a model are called in each format, and how they lie in our parameters.

Shapes: e experts, f width of an expert, m d_model, i d_inner, h heads, c channels that Mamba-2's
convolution sees.

Our names are Hugging Face's, except Mixtral's experts: stacked, `model.layers.N.mlp.experts.w1` and
`.w3` (e, f, m) and `.w2` (e, m, f), and their router `model.layers.N.mlp.gate.weight` (e, m). In
Hugging Face's files each expert has three tensors of its own under `block_sparse_moe`. The Neuron
system cuts the rows of Mamba-2's in_proj (i + c + h, m), and its bias alike, into in_proj_z (i, m),
in_proj_xBC (c, m) and in_proj_dt (h, m).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training.models import Mamba2Config, Sizes, build

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, and the parameter that it is, or of which it is an expert, or rows."""

    name: str
    shape: Shape
    parameter: str
    part: int | slice | None = None


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
        for stored in _stored(form, sizes, name, shape)
    ]


def doubles(parameters: Parameters) -> list[Stored]:
    """List the tied tensors once more, under their second names; state-spaces stores both."""
    return [
        Stored(second, parameters.shapes[first], first) for second, first in parameters.tied.items()
    ]


def mixer_parts(sizes: Mamba2Config) -> dict[str, slice]:
    """Tell which rows of in_proj are which tensor of the Neuron system."""
    parts, start = {}, 0
    widths = {"z": sizes.d_inner, "xBC": sizes.d_conv_in, "dt": sizes.n_head}
    for name, width in widths.items():
        parts[f"in_proj_{name}"] = slice(start, start + width)
        start += width
    return parts


def _stored(form: str, sizes: Sizes, name: str, shape: Shape) -> list[Stored]:
    if form in ("state-spaces", "codestral"):
        theirs = name.replace("backbone.embeddings.", "backbone.embedding.")
        return [Stored(f"model.{theirs}" if form == "codestral" else theirs, shape, name)]
    if form == "neuron" and isinstance(sizes, Mamba2Config) and ".in_proj." in name:
        return [
            Stored(name.replace("in_proj", cut), (rows.stop - rows.start, *shape[1:]), name, rows)
            for cut, rows in mixer_parts(sizes).items()
        ]
    if form == "hf" and sizes.family == "mixtral" and ".mlp." in name:
        theirs = name.replace(".mlp.", ".block_sparse_moe.")
        before, experts, last = theirs.partition(".experts.")
        if not experts:
            return [Stored(theirs, shape, name)]
        return [
            Stored(f"{before}.experts.{index}.{last}.weight", shape[1:], name, index)
            for index in range(shape[0])
        ]
    return [Stored(name, shape, name)]
