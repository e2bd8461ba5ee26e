"""Mamba-1 language model (Gu & Dao 2023, "Mamba: Linear-Time Sequence Modeling ...").

Glossary, code name = the paper's symbol:
    b       = B        batch size              l       = L     sequence length
    d_model = D        width of the stream     d_inner = E D   channels of the scan (E = expand)
    n       = N        state size (d_state)    k               taps of the convolution (d_conv)
    d_delta            rank of delta's projection (the paper's dt_rank), usually d_model / 16
    delta   = Delta    step size               A_log           log(-A), so that A stays negative
    A, B, C, D         parameters of the state space; B and C depend on the input ("selective")
    x, z               the two branches of a block: through the scan, and the gate
    v                  vocabulary size

Parameter names follow the Hugging Face and state-spaces checkpoints.
"""

# ruff: noqa: N802, N806  (A, B, C, D are the paper's own names)
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.models.language import State, wide
from training.models.mixers import Mixer, MixerModel, shown
from training.models.sizes import MambaConfig
from training.ops.conv import causal_conv1d, causal_conv1d_step
from training.ops.documents import Documents
from training.ops.scan import selective_scan, selective_scan_from


class MambaMixer(Mixer):
    """The selective state space layer (figure 3 of the paper)."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = config
        d_inner, n, d_delta = config.d_inner, config.d_state, config.d_delta
        self.in_proj = nn.Linear(config.d_model, 2 * d_inner, bias=config.bias)
        # Only holds weight (d_inner, 1, k) and bias (d_inner); causal_conv1d does the work.
        self.conv1d = nn.Conv1d(
            d_inner, d_inner, config.d_conv, groups=d_inner, bias=config.conv_bias
        )
        self.x_proj = nn.Linear(d_inner, d_delta + 2 * n, bias=False)
        self.dt_proj = nn.Linear(d_delta, d_inner, bias=True)
        self.A_log = nn.Parameter(torch.empty(d_inner, n))  # (d_inner, n)
        self.D = nn.Parameter(torch.empty(d_inner))  # (d_inner,)
        self.out_proj = nn.Linear(d_inner, config.d_model, bias=config.bias)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, documents: Documents | None = None
    ) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model); mask (b, l) is False at padding."""
        x, z = self.in_proj(hidden).chunk(2, dim=-1)  # (b, l, d_inner) each
        weight, bias = self.conv1d.weight, self.conv1d.bias  # (d_inner, 1, k), (d_inner,)
        x = causal_conv1d(shown(x, mask), weight, bias, silu=True, documents=documents)
        x = shown(x, mask)  # (b, l, d_inner)
        dt, B, C = self._selected(x)  # (b, l, d_inner | n | n)
        y = selective_scan(
            x, dt, self.A, B, C, self.D, z, self.dt_proj.bias, documents=documents
        )  # (b, l, d_inner)
        return self.out_proj(y)  # (b, l, d_model)

    def start(self, batch: int) -> State:
        """Return an empty state: the inputs of the last k - 1 steps, and h."""
        c = self.config
        return {
            "conv": self.D.new_zeros(batch, c.d_conv - 1, c.d_inner),  # (b, k - 1, d_inner)
            "scan": wide(self.D.new_zeros(batch, c.d_state, c.d_inner)),  # (b, n, d_inner)
        }

    def advance(self, hidden: Tensor, state: State) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model)."""
        x, z = self.in_proj(hidden).chunk(2, dim=-1)  # (b, l, d_inner) each
        conv = self.conv1d
        x = causal_conv1d_step(x, state["conv"], conv.weight, conv.bias, silu=True)
        dt, B, C = self._selected(x)  # (b, l, d_inner | n | n)
        y = selective_scan_from(
            state["scan"], x, dt, self.A, B, C, self.D, z, self.dt_proj.bias
        )  # (b, l, d_inner)
        return self.out_proj(y)  # (b, l, d_model)

    @property
    def A(self) -> Tensor:
        """Decay rates (d_inner, n), at least float32: the recurrence multiplies their errors."""
        return -torch.exp(wide(self.A_log))  # (d_inner, n)

    def _selected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input-dependent dt (b, l, d_inner) without its bias, B and C (b, l, n)."""
        n, d_delta = self.config.d_state, self.config.d_delta
        dt, B, C = self.x_proj(x).split([d_delta, n, n], dim=-1)  # (b, l, d_delta | n | n)
        return F.linear(dt, self.dt_proj.weight), B, C  # the scan adds the bias


class Mamba(MixerModel):
    """The language model."""

    config: MambaConfig

    def __init__(self, config: MambaConfig) -> None:
        super().__init__(config, lambda: MambaMixer(config))

    def initial_A_log(self, uniform: Tensor) -> Tensor:
        """S4D-real (section 3.6 of the paper): A = -1, -2, ... -n in every channel."""
        d_inner, n = uniform.shape
        return torch.log(torch.arange(1.0, n + 1)).repeat(d_inner, 1)  # (d_inner, n)
