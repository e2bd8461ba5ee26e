"""Mamba-2 language model (Dao & Gu 2024, "Transformers are SSMs: Generalized Models and ...").

Glossary, code name = the paper's symbol:
    b       = B        batch size              l       = L, T  sequence length
    d_model = D        width of the stream     d_inner = E D   channels of the SSM (E = expand)
    h       = H        heads (n_head)          p       = P     channels of a head (head_dim)
    g       = G        groups of heads that share B and C (n_groups)
    n       = N        state size (d_state)    k               taps of the convolution (d_conv)
    dt                 step size, before its bias and softplus make it delta
    A_log              log(-A), so that A stays negative; one number per head
    A, B, C, D         parameters of the state space; B and C depend on the input ("selective")
    x, z               the two branches of a block: through the SSM, and the gate
    v                  vocabulary size

Parameter names, and the order z, x, B, C, dt of in_proj's rows, follow the Hugging Face and
state-spaces checkpoints.
"""

# ruff: noqa: N802, N803, N806  (A, B, C, D are the paper's own names)
from __future__ import annotations

import torch
from torch import Tensor, nn

from training.models.language import State, wide
from training.models.mixers import Mixer, MixerModel, shown
from training.models.sizes import Mamba2Config
from training.ops.conv import causal_conv1d, causal_conv1d_step
from training.ops.documents import Documents
from training.ops.gated_norm import GatedRMSNorm
from training.ops.ssd import ssd, ssd_from


class Mamba2Mixer(Mixer):
    """The Mamba-2 layer (figure 6 of the paper, right)."""

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        c = self.config = config
        rows = c.d_inner + c.d_conv_in + c.n_head
        self.in_proj = nn.Linear(c.d_model, rows, bias=c.bias)
        # Only holds weight (d_conv_in, 1, k) and bias (d_conv_in); causal_conv1d does the work.
        self.conv1d = nn.Conv1d(
            c.d_conv_in, c.d_conv_in, c.d_conv, groups=c.d_conv_in, bias=c.conv_bias
        )
        self.dt_bias = nn.Parameter(torch.empty(c.n_head))  # (h,)
        self.A_log = nn.Parameter(torch.empty(c.n_head))  # (h,)
        self.D = nn.Parameter(torch.empty(c.n_head))  # (h,)
        self.norm = GatedRMSNorm(c.d_inner, 1 if c.norm_across_groups else c.n_groups, c.norm_eps)
        self.out_proj = nn.Linear(c.d_inner, c.d_model, bias=c.bias)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, documents: Documents | None = None
    ) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model); mask (b, l) is False at padding."""
        z, xBC, dt = self._projected(hidden)  # (b, l, d_inner | d_conv_in | h)
        c, conv = self.config, self.conv1d
        xBC = causal_conv1d(
            shown(xBC, mask), conv.weight, conv.bias, silu=True, documents=documents
        )  # (b, l, d_conv_in)
        x, B, C = self._split(shown(xBC, mask))  # (b, l, h, p), (b, l, g, n) twice
        y = ssd(
            *(x, dt, self.A, B, C, self.D, c.chunk_size, self.dt_bias, c.dt_limit, documents)
        )  # (b, l, h, p)
        return self.out_proj(self.norm(y.flatten(2), z))  # (b, l, d_model)

    def start(self, batch: int) -> State:
        """Return an empty state: the convolution's last k - 1 inputs, and the SSM's state."""
        c = self.config
        width = c.d_inner // c.n_groups
        return {
            "conv": self.D.new_zeros(batch, c.d_conv - 1, c.d_conv_in),  # (b, k - 1, d_conv_in)
            "ssm": wide(self.D.new_zeros(batch, c.n_groups, c.d_state, width)),  # (b, g, n, h/g p)
        }

    def advance(self, hidden: Tensor, state: State) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model)."""
        z, xBC, dt = self._projected(hidden)  # (b, l, d_inner | d_conv_in | h)
        conv = self.conv1d
        xBC = causal_conv1d_step(xBC, state["conv"], conv.weight, conv.bias, silu=True)
        x, B, C = self._split(xBC)  # (b, l, h, p), (b, l, g, n) twice
        c = self.config
        y = ssd_from(
            *(state["ssm"], x, dt, self.A, B, C, self.D, c.chunk_size, self.dt_bias, c.dt_limit)
        )  # (b, l, h, p)
        return self.out_proj(self.norm(y.flatten(2), z))  # (b, l, d_model)

    @property
    def A(self) -> Tensor:
        """Decay rates (h,), at least float32: the recurrence multiplies their errors."""
        return -torch.exp(wide(self.A_log))  # (h,)

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return z (b, l, d_inner), x with B and C (b, l, d_conv_in), dt (b, l, h)."""
        c = self.config
        sizes = [c.d_inner, c.d_conv_in, c.n_head]
        z, xBC, dt = self.in_proj(hidden).split(sizes, dim=-1)  # (b, l, d_inner | d_conv_in | h)
        return z, xBC, dt

    def _split(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(b, l, d_conv_in) -> x (b, l, h, p), B and C (b, l, g, n)."""
        c = self.config
        shared = c.n_groups * c.d_state
        x, B, C = xBC.split([c.d_inner, shared, shared], dim=-1)  # (b, l, d_inner | g n | g n)
        return (
            x.unflatten(2, (c.n_head, c.head_dim)),  # (b, l, h, p)
            B.unflatten(2, (c.n_groups, c.d_state)),  # (b, l, g, n)
            C.unflatten(2, (c.n_groups, c.d_state)),  # (b, l, g, n)
        )


class Mamba2(MixerModel):
    """The language model."""

    config: Mamba2Config

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__(config, lambda: Mamba2Mixer(config))

    def initial_A_log(self, uniform: Tensor) -> Tensor:
        return initial_A_log(uniform)  # (h,)


def initial_A_log(uniform: Tensor) -> Tensor:
    """Draw the initial log(-A): A uniform in (-16, -1], as in state-spaces' own training."""
    return torch.log(1 + 15 * uniform)  # (h,)
