"""Tensor parallelism: the ranks of a tensor group share the work of each layer.

Every parameter becomes a DTensor of the tensor group, cut or replicated, before FSDP cuts what each
rank then has. So FSDP, gradient clipping and checkpoints see one model whatever the degree.

In Mamba-2's mixer the ranks share the heads. in_proj holds the rows of z, x, B, C and dt one after
the other, so a plain cut of its rows would give a rank no heads of its own, and a checkpoint must
hold it whole under its one name. It is therefore cut by columns and gathered for use, and each rank
computes with the rows of its heads. This moves the weight once forward and its gradient once
backward, which a cut by heads would not need, but shares its memory, including the optimizer's,
which a copy on every rank would not. Small parameters (one number per head or channel) are
replicated.

Shapes: those of training.models.mamba2, and N ranks of the group.
"""

# ruff: noqa: N803, N806  (A, B, C, D are the paper's own names)
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from training import compat
from training.models.language import LanguageModel, wide
from training.models.llama import MLP, Attention
from training.models.mamba2 import Mamba2Mixer
from training.models.mixers import shown
from training.models.mixtral import Experts
from training.models.nemotron import SquaredReluMLP
from training.models.sizes import Mamba2Config
from training.ops.conv import causal_conv1d
from training.ops.documents import Documents
from training.ops.gated_norm import gated_rms_norm
from training.ops.ssd import ssd
from training.parallel.share import Share, Shared


class RowLinear(Shared, nn.Linear):
    """A linear layer that ends a shared part: each rank has the columns of its own channels."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in / N) -> (..., out), equal on all ranks; the bias is added once."""
        y = self.share.leave(F.linear(x, self.weight))  # (..., out)
        return y if self.bias is None else y + self.bias  # (..., out)


class SharedAttention(Shared, Attention):
    """Each rank has its own heads: rows of q, k and v, columns of o."""

    def forward(self, hidden: Tensor, *context: Any) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model)."""
        (hidden,) = self.share.enter(hidden)  # (b, l, d_model)
        return super().forward(hidden, *context)  # (b, l, d_model)


class SharedMLP(Shared, MLP):
    """Each rank has its own channels: rows of gate and up, columns of down."""

    def forward(self, hidden: Tensor) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model)."""
        (hidden,) = self.share.enter(hidden)  # (b, l, d_model)
        return super().forward(hidden)  # (b, l, d_model)


class SharedSquaredReluMLP(Shared, SquaredReluMLP):
    """Each rank has its own channels: rows of up, columns of down."""

    def forward(self, hidden: Tensor) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model)."""
        (hidden,) = self.share.enter(hidden)  # (b, l, d_model)
        return super().forward(hidden)  # (b, l, d_model)


class SharedExperts(Shared, Experts):
    """Each rank has some channels of every expert; all ranks route alike."""

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """(t, d_model), (t, k), (t, k) -> (t, d_model)."""
        # Two calls: x may be bfloat16, but the weights are float32.
        (x,), (weights,) = self.share.enter(x), self.share.enter(weights)  # (t, m), (t, k)
        return self.share.leave(super().forward(x, weights, chosen))  # (t, d_model)


class GatheredLinear(Shared, nn.Linear):
    """A linear layer that is stored cut; every rank computes with rows of its own choice."""

    def whole(self) -> Tensor:
        """Gather the weight (out, in); its gradients are summed over the ranks and cut again."""
        weight: Any = nn.Module.__getattr__(self, "weight")  # the DTensor
        gathered = weight.redistribute(placements=[compat.Replicate()])  # (out, in)
        return gathered.to_local(grad_placements=[compat.Partial()])  # (out, in)


class SharedMixer(Shared, Mamba2Mixer):
    """Each rank has its own heads, and B and C of their groups."""

    in_proj: GatheredLinear

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, documents: Documents | None = None
    ) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model); mask (b, l) is False at padding."""
        c, rows = self.config, MixerRows(self.config, self.share)
        small, heads = self._small(), self.share.own(c.n_head)
        in_bias = rows.projected(small["in_bias"]) if c.bias else None  # (rows,)
        conv_bias = rows.convolved(small["conv_bias"]) if c.conv_bias else None  # (channels,)
        (hidden,) = self.share.enter(hidden)  # (b, l, d_model)
        weight = rows.projected(self.in_proj.whole())  # (rows, d_model)
        projected = F.linear(hidden, weight, in_bias)  # (b, l, rows)
        z, xBC, dt = projected.split(rows.sizes, dim=-1)  # (b, l, d_inner / N | channels | h / N)
        conv = rows.convolved(small["conv"])  # (channels, 1, k)
        xBC = causal_conv1d(
            shown(xBC, mask), conv, conv_bias, silu=True, documents=documents
        )  # (b, l, channels)
        x, B, C = rows.split(shown(xBC, mask))  # (b, l, h / N, p), (b, l, own groups, n) twice
        A = -torch.exp(wide(small["A_log"][heads]))  # (h / N,)
        D, dt_bias = small["D"][heads], small["dt_bias"][heads]  # (h / N,) both
        y = ssd(x, dt, A, B, C, D, c.chunk_size, dt_bias, c.dt_limit, documents)  # (b, l, h / N, p)
        scale = small["norm"][self.share.own(c.d_inner)]  # (d_inner / N,)
        groups, mean = self.share.mean(self.norm.groups)
        y = gated_rms_norm(y.flatten(2), z, scale, groups, self.norm.eps, mean)
        return self.out_proj(y)  # (b, l, d_model)

    def _small(self) -> dict[str, Tensor]:
        """Return the parameters with one number per row, head or channel, whole."""
        held = {
            "in_bias": self.in_proj.bias,  # (d_inner + d_conv_in + h,), or none
            "conv": self.conv1d.weight,  # (d_conv_in, 1, k)
            "conv_bias": self.conv1d.bias,  # (d_conv_in,), or none
            "A_log": self.A_log,  # (h,)
            "D": self.D,  # (h,)
            "dt_bias": self.dt_bias,  # (h,)
            "norm": self.norm.weight,  # (d_inner,)
        }
        there = {name: one for name, one in held.items() if one is not None}
        return dict(zip(there, self.share.enter(*there.values()), strict=True))


class MixerRows:
    """The rows of the packed parameters that belong to a rank."""

    def __init__(self, config: Mamba2Config, share: Share) -> None:
        c = self.config = config
        inner, heads = share.own(c.d_inner), share.own(c.n_head)
        # A rank has whole groups or, if these are fewer than the ranks, one that others have too.
        groups = max(1, c.n_groups // share.size)
        first = share.rank * c.n_groups // share.size
        shared = slice(first * c.d_state, (first + groups) * c.d_state)  # of B's rows, and of C's
        width = c.n_groups * c.d_state
        self.conv = [
            inner,
            _after(c.d_inner, shared),
            _after(c.d_inner + width, shared),
        ]
        self.all = [
            inner,
            *(_after(c.d_inner, part) for part in self.conv),
            _after(c.d_inner + c.d_conv_in, heads),
        ]
        self.parts = [_length(part) for part in self.conv]  # of x, B and C
        self.sizes = [_length(inner), sum(self.parts), _length(heads)]  # of z, xBC and dt

    def projected(self, packed: Tensor) -> Tensor:
        """Select rows of in_proj, (d_inner + d_conv_in + h, ...) -> (rows, ...)."""
        return torch.cat([packed[part] for part in self.all])  # (rows, ...)

    def convolved(self, packed: Tensor) -> Tensor:
        """Select channels of the convolution, (d_conv_in, ...) -> (channels, ...)."""
        return torch.cat([packed[part] for part in self.conv])  # (channels, ...)

    def split(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(b, l, channels) -> x (b, l, h / N, p), B and C (b, l, own groups, n)."""
        c = self.config
        x, B, C = xBC.split(self.parts, dim=-1)  # (b, l, d_inner / N | groups n | groups n)
        return (
            x.unflatten(2, (-1, c.head_dim)),  # (b, l, h / N, p)
            B.unflatten(2, (-1, c.d_state)),  # (b, l, own groups, n)
            C.unflatten(2, (-1, c.d_state)),  # (b, l, own groups, n)
        )


def _after(start: int, part: slice) -> slice:
    return slice(start + part.start, start + part.stop)


def _length(part: slice) -> int:
    return int(part.stop - part.start)


_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROW = ("o_proj", "down_proj", "out_proj")
_EXPERTS = {"w1": 1, "w2": 2, "w3": 1}
_LAYERS: dict[type[nn.Module], type[Shared]] = {
    Attention: SharedAttention,
    MLP: SharedMLP,
    SquaredReluMLP: SharedSquaredReluMLP,
    Experts: SharedExperts,
    Mamba2Mixer: SharedMixer,
}


def split_layers(model: LanguageModel, mesh: DeviceMesh, device: torch.device) -> None:
    """Make the ranks of a one-dimensional mesh share the layers; in place.

    Parameters on the meta device stay there; all others move to the group's device.
    """
    share = Share(mesh.get_local_rank(), mesh.size(), mesh.get_group())
    for name, parameter in list(model.named_parameters()):
        model.put(
            name, nn.Parameter(_distributed(parameter.detach(), cut_dimension(name), mesh, device))
        )
    for name, module in list(model.named_modules()):
        if type(module) in _LAYERS or next(module.parameters(recurse=False), None) is not None:
            module.__class__ = _shared_class(name, type(module))
            module.share = share  # type: ignore[assignment]


def cut_dimension(name: str) -> int | None:
    """Return the dimension in which a parameter is cut; None if every rank has all of it."""
    owner, _, kind = name.rpartition(".")
    module = owner.rpartition(".")[2]
    if module in _COLUMN:
        return 0
    if kind == "weight" and module in (*_ROW, "in_proj"):
        return 1
    return _EXPERTS.get(kind)


def _distributed(whole: Tensor, dim: int | None, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """Make a parameter's DTensor from this rank's part of it."""
    local = whole
    if dim is not None:
        local = whole.chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()  # its part
    value: Any = compat.DTensor.from_local(
        local if whole.is_meta else local.to(device),
        mesh,
        [compat.Replicate() if dim is None else compat.Shard(dim)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return value  # the shape of the whole


def _shared_class(name: str, plain: type[nn.Module]) -> type[nn.Module]:
    """Find or make the class that replaces a plain one; it has no state of its own."""
    if plain in _LAYERS:
        return _LAYERS[plain]
    last = name.rpartition(".")[2]
    if last in _ROW:
        return RowLinear
    if last == "in_proj":
        return GatheredLinear
    return type(plain.__name__, (Shared, plain), {})
