"""Mamba-2 made of layers that the ranks of a tensor group share: each has its heads and words.

A group of heads, with its B and C, is on one rank, so the number of groups must be a multiple of
that of ranks.
Shapes: those of training.models.mamba2, and N ranks of the group.
"""

# ruff: noqa: N803, N806  (A, B, C, D are the paper's own names)
from __future__ import annotations

import torch
from torch import Tensor, nn

from training.models.language import wide
from training.models.mamba2 import Mamba2
from training.models.mixers import Mixer, MixerModel, shown
from training.models.sizes import Mamba2Config
from training.ops.conv import causal_conv1d
from training.ops.documents import Documents
from training.ops.gated_norm import GatedRMSNorm, gated_rms_norm
from training.ops.ssd import ssd
from training.parallel.neuron.layers import Layers


class NeuronMixer(Mixer):
    """The Mamba-2 layer; in_proj is three layers, so that each can be cut by heads."""

    def __init__(self, config: Mamba2Config, layers: Layers) -> None:
        super().__init__()
        c, n = config, layers.share.size
        self.config, self.share = config, layers.share
        self.heads, self.groups = c.n_head // n, c.n_groups // n
        self.in_proj_z = layers.column(c.d_model, c.d_inner, c.bias)
        self.in_proj_xBC = layers.column(c.d_model, c.d_conv_in, c.bias)
        self.in_proj_dt = layers.column(c.d_model, c.n_head, c.bias)
        channels = c.d_conv_in // n
        # Only holds weight (channels, 1, k) and bias (channels); causal_conv1d does the work.
        self.conv1d = nn.Conv1d(channels, channels, c.d_conv, groups=channels, bias=c.conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(self.heads))  # (h / N,)
        self.A_log = nn.Parameter(torch.empty(self.heads))  # (h / N,)
        self.D = nn.Parameter(torch.empty(self.heads))  # (h / N,)
        norm_groups = 1 if c.norm_across_groups else c.n_groups
        self.norm = GatedRMSNorm(c.d_inner // n, norm_groups, c.norm_eps)
        self.out_proj = layers.row(c.d_inner, c.d_model, c.bias)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, documents: Documents | None = None
    ) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model); mask (b, l) is False at padding."""
        z = self.in_proj_z(hidden)  # (b, l, d_inner / N)
        xBC = self.in_proj_xBC(hidden)  # (b, l, d_conv_in / N)
        dt = self.in_proj_dt(hidden)  # (b, l, h / N)
        conv = self.conv1d
        xBC = causal_conv1d(
            shown(xBC, mask), conv.weight, conv.bias, silu=True, documents=documents
        )  # (b, l, d_conv_in / N)
        x, B, C = self._split(shown(xBC, mask))  # (b, l, h / N, p), (b, l, g / N, n) twice
        A = -torch.exp(wide(self.A_log))  # (h / N,)
        c = self.config
        y = ssd(
            x, dt, A, B, C, self.D, c.chunk_size, self.dt_bias, c.dt_limit, documents
        )  # (b, l, h / N, p)
        groups, mean = self.share.mean(self.norm.groups)
        y = gated_rms_norm(y.flatten(2), z, self.norm.weight, groups, self.norm.eps, mean)
        return self.out_proj(y)  # (b, l, d_model)

    def _split(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(b, l, d_conv_in / N) -> x (b, l, h / N, p), B and C (b, l, g / N, n)."""
        c = self.config
        shared = self.groups * c.d_state
        x, B, C = xBC.split([self.heads * c.head_dim, shared, shared], dim=-1)
        return (
            x.unflatten(2, (self.heads, c.head_dim)),  # (b, l, h / N, p)
            B.unflatten(2, (self.groups, c.d_state)),  # (b, l, g / N, n)
            C.unflatten(2, (self.groups, c.d_state)),  # (b, l, g / N, n)
        )


class NeuronMamba2(Mamba2):
    """The language model; it trains and returns logits, but cannot generate."""

    def __init__(self, config: Mamba2Config, layers: Layers) -> None:
        MixerModel.__init__(self, config, lambda: NeuronMixer(config, layers))
        self.layers = layers
        self.backbone.embeddings = layers.embedding(config.vocab_size, config.d_model)  # type: ignore[assignment]
        self.lm_head = layers.column(config.d_model, config.vocab_size, bias=False)  # type: ignore[assignment]
        self.tie({"lm_head.weight": "backbone.embeddings.weight"})

    def loss(
        self, hidden: Tensor, targets: Tensor, weights: Tensor | None, total: Tensor | None
    ) -> Tensor:
        return self.layers.loss(hidden, self.output, targets, weights, total)  # ()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.layers.logits(hidden, self.output)  # (b, l, v)
