"""The names of a model's tensors in each format, and their places in our parameters.

Shapes: e experts, f width of an expert, m d_model, i d_inner, h heads, c channels of Mamba-2's
convolution.

Our names are Hugging Face's, except those of experts, which are stacked:
`model.layers.N.mlp.experts.w1` and `.w3` (e, f, m) and `.w2` (e, m, f), with their router
`model.layers.N.mlp.gate.weight` (e, m). In Hugging Face's files, each expert of Mixtral has three
tensors of its own under `block_sparse_moe`. Granite's experts are stacked there, too, but w1 and w3
are one tensor `input_linear` (e, 2 f, m), and so are gate_proj and up_proj of its MLP (2 f, m).
mamba-ssm uses Mamba-2's names for Bamba; it joins q_proj, k_proj and v_proj into in_proj, and
up_proj and gate_proj into fc1. The Neuron system cuts the rows of Mamba-2's in_proj (i + c + h, m),
and likewise its bias, into in_proj_z (i, m), in_proj_xBC (c, m) and in_proj_dt (h, m).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training.models import BambaConfig, Mamba2Config, Sizes, build

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, and the parameter that it is, or of which it is one expert or some rows.

    part: which expert or rows; None if it is all of the parameter. joined: if the tensor is several
    parameters one after the other, the dimension that they are joined in, and where this parameter
    begins in it; there is a Stored for each of them.
    """

    name: str
    shape: Shape
    parameter: str
    part: int | slice | None = None
    joined: tuple[int, int] | None = None


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model; `tied`: second names -> first names of the same parameters."""

    shapes: dict[str, Shape]
    tied: dict[str, str]

    @classmethod
    def of(cls, sizes: Sizes) -> Parameters:
        """Take them from the model itself, without making any values."""
        with torch.device("meta"):
            model = build(sizes)
        return cls({n: tuple(p.shape) for n, p in model.named_parameters()}, model.tied)


def layout(form: str, sizes: Sizes, parameters: Parameters) -> list[Stored]:
    """List the tensors that a format stores of a model, in the order of the parameters."""
    return [
        stored
        for name, shape in parameters.shapes.items()
        for stored in _stored(form, sizes, name, shape)
    ]


def doubles(parameters: Parameters) -> list[Stored]:
    """List the tied tensors again, under their second names; state-spaces stores both."""
    return [
        Stored(second, parameters.shapes[first], first) for second, first in parameters.tied.items()
    ]


def mixer_parts(sizes: Mamba2Config) -> dict[str, slice]:
    """Return which rows of in_proj are which tensor of the Neuron system."""
    parts, start = {}, 0
    widths = {"z": sizes.d_inner, "xBC": sizes.d_conv_in, "dt": sizes.n_head}
    for name, width in widths.items():
        parts[f"in_proj_{name}"] = slice(start, start + width)
        start += width
    return parts


def _stored(form: str, sizes: Sizes, name: str, shape: Shape) -> list[Stored]:
    if form == "state-spaces" and isinstance(sizes, BambaConfig):
        return [_of_mamba_ssm(sizes, name, shape)]
    if form in ("state-spaces", "codestral"):
        theirs = name.replace("backbone.embeddings.", "backbone.embedding.")
        return [Stored(f"model.{theirs}" if form == "codestral" else theirs, shape, name)]
    if form == "neuron" and isinstance(sizes, Mamba2Config) and ".in_proj." in name:
        return [
            Stored(name.replace("in_proj", cut), (rows.stop - rows.start, *shape[1:]), name, rows)
            for cut, rows in mixer_parts(sizes).items()
        ]
    if form == "hf" and sizes.family == "granitemoehybrid":
        return [_of_granite(name, shape)]
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


_OF_GRANITE = {
    "block_sparse_moe.gate.weight": ("block_sparse_moe.router.layer.weight", None),
    "block_sparse_moe.experts.w1": ("block_sparse_moe.input_linear.weight", (1, 0)),
    "block_sparse_moe.experts.w3": ("block_sparse_moe.input_linear.weight", (1, 1)),
    "block_sparse_moe.experts.w2": ("block_sparse_moe.output_linear.weight", None),
    "shared_mlp.gate_proj.weight": ("shared_mlp.input_linear.weight", (0, 0)),
    "shared_mlp.up_proj.weight": ("shared_mlp.input_linear.weight", (0, 1)),
    "shared_mlp.down_proj.weight": ("shared_mlp.output_linear.weight", None),
}
"""Ends of our names -> those of the files and, if two are joined, the dimension and which it is."""


def _of_granite(name: str, shape: Shape) -> Stored:
    for ours, (theirs, joined) in _OF_GRANITE.items():
        if not name.endswith(f".{ours}"):
            continue
        theirs = f"{name.removesuffix(ours)}{theirs}"
        if joined is None:
            return Stored(theirs, shape, name)
        dim, which = joined
        whole = (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :])
        return Stored(theirs, whole, name, joined=(dim, which * shape[dim]))
    return Stored(name, shape, name)


_OF_MAMBA_SSM = (
    (".input_layernorm.", ".norm."),
    (".pre_ff_layernorm.", ".norm2."),
    (".mamba.", ".mixer."),
    (".self_attn.o_proj.", ".mixer.out_proj."),
    (".feed_forward.down_proj.", ".mlp.fc2."),
    ("model.final_layernorm.", "backbone.norm_f."),
    ("model.embed_tokens.", "backbone.embedding."),
    ("model.layers.", "backbone.layers."),
)


def _of_mamba_ssm(sizes: BambaConfig, name: str, shape: Shape) -> Stored:
    theirs = name
    for ours, other in _OF_MAMBA_SSM:
        theirs = theirs.replace(ours, other)
    owner, _, kind = theirs.rpartition(".")
    before, _, module = owner.rpartition(".")
    q, kv = sizes.n_head * sizes.d_head, sizes.n_kv_head * sizes.d_head
    if module in ("q_proj", "k_proj", "v_proj"):
        start = {"q_proj": 0, "k_proj": q, "v_proj": q + kv}[module]
        theirs = f"{before.removesuffix('self_attn')}mixer.in_proj.{kind}"
        return Stored(theirs, (q + 2 * kv, *shape[1:]), name, joined=(0, start))
    if module in ("up_proj", "gate_proj"):
        start = 0 if module == "up_proj" else sizes.d_ff
        theirs = f"{before.removesuffix('feed_forward')}mlp.fc1.{kind}"
        return Stored(theirs, (2 * sizes.d_ff, *shape[1:]), name, joined=(0, start))
    return Stored(theirs, shape, name)
