"""Mamba-2's mixer, its heads shared by the ranks of a tensor group.

in_proj holds the rows of z, x, B, C and dt one after the other, so a plain cut of its rows would
give a rank no heads of its own, and a checkpoint must hold it whole under its one name. It is kept
cut by columns, gathered when it is used, and each rank computes with the rows of its heads: the
group moves the weight once forward and its gradient once back, which a cut by heads would not need,
and shares its memory, the optimizer's included, which a copy on every rank would not do. The small
parameters (one number a head or channel) are on every rank.

Shapes: those of training.models.mamba2, and N ranks of the group.
"""

# ruff: noqa: N806  (A, B, C, D are the paper's own names)
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import compat
from training.models.language import wide
from training.models.mamba2 import Mamba2Mixer
from training.models.mixers import shown
from training.models.sizes import Mamba2Config
from training.ops.conv import causal_conv1d
from training.ops.gated_norm import gated_rms_norm
from training.ops.ssd import ssd
from training.parallel.share import Share, Shared


class GatheredLinear(Shared, nn.Linear):
    """A linear layer that is kept cut; every rank computes with rows of its own choice."""

    def whole(self) -> Tensor:
        """The weight (out, in); its gradients of all ranks are added up, and cut again."""
        weight: Any = nn.Module.__getattr__(self, "weight")  # the DTensor
        gathered = weight.redistribute(placements=[compat.Replicate()])  # (out, in)
        return gathered.to_local(grad_placements=[compat.Partial()])  # (out, in)


class SharedMixer(Shared, Mamba2Mixer):
    """Each rank has its own heads, and B and C of their groups."""

    in_proj: GatheredLinear

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model); mask (b, l) is False where there is padding."""
        c, rows = self.config, Rows(self.config, self.share)
        small, heads = self._small(), self.share.own(c.n_head)
        in_bias = rows.projected(small["in_bias"]) if c.bias else None  # (rows,)
        conv_bias = rows.convolved(small["conv_bias"]) if c.conv_bias else None  # (channels,)
        (hidden,) = self.share.enter(hidden)  # (b, l, d_model)
        weight = rows.projected(self.in_proj.whole())  # (rows, d_model)
        projected = F.linear(hidden, weight, in_bias)  # (b, l, rows)
        z, xBC, dt = projected.split(rows.sizes, dim=-1)  # (b, l, d_inner / N | channels | h / N)
        conv = rows.convolved(small["conv"])  # (channels, 1, k)
        xBC = causal_conv1d(shown(xBC, mask), conv, conv_bias, silu=True)  # (b, l, channels)
        x, B, C = rows.split(shown(xBC, mask))  # (b, l, h / N, p), (b, l, own groups, n) twice
        A = -torch.exp(wide(small["A_log"][heads]))  # (h / N,)
        D, dt_bias = small["D"][heads], small["dt_bias"][heads]  # (h / N,) both
        y = ssd(x, dt, A, B, C, D, c.chunk_size, dt_bias)  # (b, l, h / N, p)
        scale = small["norm"][self.share.own(c.d_inner)]  # (d_inner / N,)
        groups, mean = self.share.mean(self.norm.groups)
        y = gated_rms_norm(y.flatten(2), z, scale, groups, self.norm.eps, mean)
        return self.out_proj(y)  # (b, l, d_model)

    def _small(self) -> dict[str, Tensor]:
        """The parameters of one number a row, head or channel, whole."""
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


class Rows:
    """Which rows of the packed parameters are a rank's own."""

    def __init__(self, config: Mamba2Config, share: Share) -> None:
        c = self.config = config
        inner, heads = share.own(c.d_inner), share.own(c.n_head)
        # A rank has whole groups, or, where there are fewer than ranks, one that others have too.
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
        """Rows of in_proj, (d_inner + d_conv_in + h, ...) -> (rows, ...)."""
        return torch.cat([packed[part] for part in self.all])  # (rows, ...)

    def convolved(self, packed: Tensor) -> Tensor:
        """Channels of the convolution, (d_conv_in, ...) -> (channels, ...)."""
        return torch.cat([packed[part] for part in self.conv])  # (channels, ...)

    def split(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: N803
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
