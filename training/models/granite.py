"""Granite 4 H language models (ibm-granite/granite-4.0-h-tiny and others).

Layers of Mamba-2, or of attention where the pattern has it, each followed by an MLP for all tokens
and, in the larger models, by experts in parallel with it. There are no positions: the state space
encodes the order of the tokens. The embedding, the residual branches, the attention scores and
the logits have multipliers; see GraniteHybridConfig.

Glossary: see training.models.mamba2, training.models.llama and training.models.mixtral.
The first two matrices of an MLP or an expert are separate parameters here; checkpoints join them
(shared_mlp.input_linear). All other names follow the Hugging Face checkpoints.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from training.models.hybrid_sizes import GraniteHybridConfig
from training.models.hybrids import HybridModel, TwoPartLayer, mix
from training.models.llama import MLP
from training.models.mixtral import BalancedModel, SparseMLP
from training.ops.norm import RMSNorm
from training.ops.route import load


class Layer(TwoPartLayer):
    """Mamba-2 or attention, then an MLP and experts; each part is pre-normed and has a residual."""

    def __init__(self, config: GraniteHybridConfig, kind: str) -> None:
        super().__init__(config, kind)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.block_sparse_moe = SparseMLP(config.experts) if config.n_expert else None
        self.shared_mlp = MLP(config.attention)

    def inner(self, hidden: Tensor, *context: Any) -> Any:
        """(b, l, d_model) -> (b, l, d_model), plus the experts' load (2, e) if `balanced`."""
        *given, balanced = context
        if not balanced:
            return super().inner(hidden, *given)  # (b, l, d_model)
        cos, sin, mask, documents = given
        mixed = mix(self.part, self.normed(hidden), cos, sin, mask, documents)  # (b, l, d_model)
        hidden = self.added(hidden, mixed)  # (b, l, d_model)
        x = self.post_attention_layernorm(hidden)  # (b, l, d_model)
        assert self.block_sparse_moe is not None, "only experts are balanced"
        y, logits, chosen = self.block_sparse_moe.routed(x)  # (b, l, d_model), (t, e), (t, k)
        counts = None if mask is None else mask.flatten()  # (t,)
        return self.added(hidden, y + self.shared_mlp(x)), load(logits, chosen, counts)

    def finished(self, hidden: Tensor) -> Tensor:
        """Apply the MLP and the experts, (b, l, d_model) -> (b, l, d_model)."""
        x = self.post_attention_layernorm(hidden)  # (b, l, d_model)
        made = self.shared_mlp(x)  # (b, l, d_model)
        if self.block_sparse_moe is not None:
            made = self.block_sparse_moe(x) + made  # (b, l, d_model)
        return self.added(hidden, made)  # (b, l, d_model)


class GraniteHybrid(BalancedModel, HybridModel):
    """The language model."""

    config: GraniteHybridConfig

    def __init__(self, config: GraniteHybridConfig) -> None:
        super().__init__(config, [Layer(config, kind) for kind in config.pattern])

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * self.config.embedding_multiplier  # (b, l, d_model)

    def finish(self, hidden: Tensor) -> Tensor:
        # Dividing here divides the logits, which the loss never holds.
        return super().finish(hidden) / self.config.logits_scaling  # (b, l, d_model)

    def deviation(self, module: str) -> float:
        """Return the deviation by muP: logits_scaling is the width relative to muP's base model."""
        width = 1.0 if module in (self.EMBEDDING, "lm_head") else self.config.logits_scaling
        return self.config.initializer_range / math.sqrt(width)
