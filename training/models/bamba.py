"""Bamba language model (ibm-ai-platform/Bamba-9B; Ganti et al. 2024, the layout of fms-fsdp).

Layers of Mamba-2, or of attention where the pattern has it, each followed by an MLP. Attention
rotates half of each head's channels.

Glossary: see training.models.mamba2 and training.models.llama. Parameter names follow the Hugging
Face checkpoints.
"""

from __future__ import annotations

from torch import Tensor

from training.models.hybrid_sizes import BambaConfig
from training.models.hybrids import HybridModel, TwoPartLayer
from training.models.llama import MLP
from training.ops.norm import RMSNorm


class Layer(TwoPartLayer):
    """Mamba-2 or attention, then an MLP, each pre-normed and with a residual."""

    def __init__(self, config: BambaConfig, kind: str) -> None:
        super().__init__(config, kind)
        self.pre_ff_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.feed_forward = MLP(config.attention)

    def finished(self, hidden: Tensor) -> Tensor:
        """Apply the MLP, (b, l, d_model) -> (b, l, d_model)."""
        made = self.feed_forward(self.pre_ff_layernorm(hidden))  # (b, l, d_model)
        return self.added(hidden, made)  # (b, l, d_model)


class Bamba(HybridModel):
    """The language model."""

    NORM = "final_layernorm"

    def __init__(self, config: BambaConfig) -> None:
        super().__init__(config, [Layer(config, kind) for kind in config.pattern])
