"""Bamba language model (ibm-ai-platform/Bamba-9B; Ganti et al. 2024, the layout of fms-fsdp).

Layers of Mamba-2, with attention at those where the pattern says so, each with an MLP after it.
Half of the channels of attention's heads turn with the position.

Glossary: those of training.models.mamba2 and training.models.llama. Parameter names are those of
the Hugging Face checkpoints.
"""

from __future__ import annotations

from torch import Tensor

from training.models.hybrid_sizes import BambaConfig
from training.models.hybrids import HybridModel, TwoPartLayer
from training.models.llama import MLP
from training.ops.norm import RMSNorm


class Layer(TwoPartLayer):
    """Mamba-2 or attention, then an MLP, each with its norm before it and its residual."""

    def __init__(self, config: BambaConfig, kind: str) -> None:
        super().__init__(config, kind)
        self.pre_ff_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.feed_forward = MLP(config.attention)

    def finished(self, hidden: Tensor) -> Tensor:
        """The MLP, (b, l, d_model) -> (b, l, d_model)."""
        made = self.feed_forward(self.pre_ff_layernorm(hidden))  # (b, l, d_model)
        return self.added(hidden, made)  # (b, l, d_model)


class Bamba(HybridModel):
    """The language model."""

    NORM = "final_layernorm"

    def __init__(self, config: BambaConfig) -> None:
        super().__init__(config, [Layer(config, kind) for kind in config.pattern])
