"""Mamba-1 language model (Gu & Dao 2023, "Mamba: Linear-Time Sequence Modeling ...").

Glossary, code name = the paper's symbol:
    b       = B        batch size              l       = L     sequence length
    d_model = D        width of the stream     d_inner = E D   channels of the scan (E = expand)
    n       = N        state size (d_state)    k               taps of the convolution (d_conv)
    dt_rank            rank of delta's projection, ceil(d_model / 16)
    delta   = Delta    step size               A_log           log(-A), so that A stays negative
    A, B, C, D         parameters of the state space; B and C depend on the input ("selective")
    x, z               the two branches of a block: through the scan, and the gate
    v                  vocabulary size

Parameter names are those of the Hugging Face and state-spaces checkpoints.
"""

# ruff: noqa: N806  (A, B, C, D are the paper's own names)
from __future__ import annotations

import hashlib
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from training.models import MambaConfig
from training.ops.conv import causal_conv1d
from training.ops.loss import next_token_cross_entropy
from training.ops.norm import RMSNorm
from training.ops.scan import selective_scan


class Mixer(nn.Module):
    """The selective state space layer (figure 3 of the paper), without norm and residual."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = config
        d_inner, n, dt_rank = config.d_inner, config.d_state, config.dt_rank
        self.in_proj = nn.Linear(config.d_model, 2 * d_inner, bias=False)
        # Holds weight (d_inner, 1, k) and bias (d_inner); causal_conv1d does the work.
        self.conv1d = nn.Conv1d(d_inner, d_inner, config.d_conv, groups=d_inner)
        self.x_proj = nn.Linear(d_inner, dt_rank + 2 * n, bias=False)
        self.dt_proj = nn.Linear(dt_rank, d_inner, bias=True)
        self.A_log = nn.Parameter(torch.empty(d_inner, n))  # (d_inner, n)
        self.D = nn.Parameter(torch.empty(d_inner))  # (d_inner,)
        self.out_proj = nn.Linear(d_inner, config.d_model, bias=False)
        self.scan = selective_scan  # one that torch.compile does not enter, when compiling

    def forward(self, hidden: Tensor) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model)."""
        n, dt_rank = self.config.d_state, self.config.dt_rank
        x, z = self.in_proj(hidden).chunk(2, dim=-1)  # (b, l, d_inner) each
        x = F.silu(causal_conv1d(x, self.conv1d.weight, self.conv1d.bias))  # (b, l, d_inner)
        dt, B, C = self.x_proj(x).split([dt_rank, n, n], dim=-1)  # (b, l, dt_rank | n | n)
        # Step sizes and decays are float32 always: the recurrence multiplies their errors.
        dt = F.linear(dt, self.dt_proj.weight)  # (b, l, d_inner)
        delta = F.softplus(_wide(dt) + _wide(self.dt_proj.bias))  # (b, l, d_inner)
        A = -torch.exp(_wide(self.A_log))  # (d_inner, n)
        y = self.scan(x, delta, A, B, C, self.D)  # (b, l, d_inner)
        return self.out_proj(y * F.silu(z))  # (b, l, d_model)


class Block(nn.Module):
    """Norm, mixer and residual: the unit of sharding, recomputation and compilation."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.recompute = False  # keep only the input, compute the rest again in the backward pass
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.mixer = Mixer(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model), float32 where residual_in_fp32."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.inner, hidden, use_reentrant=False)  # (b, l, d_model)
        return self.inner(hidden)  # (b, l, d_model)

    def inner(self, hidden: Tensor) -> Tensor:
        """Compute `forward`; this is what is recomputed and compiled."""
        residual = _wide(hidden) if self.residual_in_fp32 else hidden  # (b, l, d_model)
        return residual + self.mixer(self.norm(hidden))  # (b, l, d_model)


class Backbone(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm_f = RMSNorm(config.d_model, config.norm_eps)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(b, l) -> (b, l, d_model)."""
        hidden = self.embeddings(input_ids)  # (b, l, d_model)
        for layer in self.layers:
            hidden = layer(hidden)  # (b, l, d_model)
        return self.norm_f(hidden)  # (b, l, d_model)


class Mamba(nn.Module):
    """The language model; its output embedding is the input embedding (tied)."""

    tied: ClassVar[dict[str, str]] = {"lm_head.weight": "backbone.embeddings.weight"}
    """Second names of parameters -> the first."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.lm_head.weight = self.backbone.embeddings.weight  # (v, d_model)

    @property
    def blocks(self) -> list[Block]:
        return [layer for layer in self.backbone.layers if isinstance(layer, Block)]

    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (b, l, v), or with targets (b, l) the mean loss (), without holding the logits."""
        hidden = self.backbone(input_ids)  # (b, l, d_model)
        if targets is None:
            return self.lm_head(hidden)  # (b, l, v)
        return next_token_cross_entropy(hidden, self.lm_head.weight, targets)  # ()

    def initial(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        """Make the first value of a parameter: a pure function of its name and the seed.

        So each rank can make the part that it owns, whatever the number of ranks. Follows the
        paper's section 3.6 and appendix C: delta starts log-uniform in [dt_min, dt_max], A as
        S4D-real, the out projection scaled down by the depth (GPT-2).
        """
        c = self.config
        random = torch.Generator().manual_seed(_seed_of(name, seed))
        owner, _, kind = name.rpartition(".")
        module = owner.rpartition(".")[2]
        if kind == "A_log":
            return torch.log(torch.arange(1.0, c.d_state + 1)).repeat(c.d_inner, 1)  # (d_inner, n)
        if kind == "D" or module in ("norm", "norm_f"):
            return torch.ones(shape)
        if module in ("embeddings", "lm_head"):
            return torch.randn(shape, generator=random) * c.initializer_range  # (v, d_model)
        uniform = torch.rand(shape, generator=random)  # shape
        if module == "dt_proj" and kind == "bias":
            low, high = math.log(c.dt_min), math.log(c.dt_max)
            dt = torch.exp(low + uniform * (high - low)).clamp(min=c.dt_init_floor)  # (d_inner,)
            return dt + torch.log(-torch.expm1(-dt))  # (d_inner,), the inverse of softplus
        fan_in = {"conv1d": c.d_conv, "dt_proj": c.dt_rank}.get(module, shape[-1])
        depth = math.sqrt(c.n_layer) if module == "out_proj" else 1.0
        return (2 * uniform - 1) / (math.sqrt(fan_in) * depth)  # shape


def _wide(x: Tensor) -> Tensor:
    """Float32, or float64 where x is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
