"""Nemotron-H language model (Blakeman et al. 2025, arXiv:2504.03624, section 2.1).

Each layer is Mamba-2, attention without positions, or an MLP with squared ReLU (So et al. 2021,
"Primer"). The state space encodes the order of the tokens.

Glossary: see training.models.mamba2 and training.models.llama. Parameter names follow the Hugging
Face checkpoints.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from training.models.hybrid_sizes import ATTENTION, MAMBA, NemotronHConfig
from training.models.hybrids import HybridLayer, HybridModel
from training.models.llama import Attention
from training.models.mamba2 import Mamba2Mixer
from training.ops.norm import RMSNorm


class SquaredReluMLP(nn.Module):
    """Two linear layers with squared ReLU between them."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model)."""
        return self.down_proj(F.relu(self.up_proj(hidden)).square())  # (b, l, d_model)


class Layer(HybridLayer):
    """Norm, mixer and residual."""

    def __init__(self, config: NemotronHConfig, kind: str) -> None:
        super().__init__(config)
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.mixer = self.made(config, kind)

    @staticmethod
    def made(config: NemotronHConfig, kind: str) -> nn.Module:
        if kind == MAMBA:
            return Mamba2Mixer(config.mamba)
        return Attention(config.attention) if kind == ATTENTION else SquaredReluMLP(config)

    @property
    def part(self) -> nn.Module:
        return self.mixer

    def normed(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)  # (b, l, d_model)


class NemotronH(HybridModel):
    """The language model."""

    BACKBONE, EMBEDDING, NORM = "backbone", "embeddings", "norm_f"

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__(config, [Layer(config, kind) for kind in config.pattern])
