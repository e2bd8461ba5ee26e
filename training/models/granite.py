"""Granite 4 H language models (ibm-granite/granite-4.0-h-tiny and others).

Layers of Mamba-2, with attention where the pattern says so, each with an MLP that every token goes
through and, in the larger models, experts beside it. No positions: the state space gives the order
of the tokens. The embedding, what joins the stream, attention's scores and the logits have
multipliers, as GraniteHybridConfig says.

Glossary: those of training.models.mamba2, training.models.llama and training.models.mixtral.
The parameters hold an MLP's or an expert's first two matrices apart: checkpoints have them in one
(shared_mlp.input_linear). All other names are those of the Hugging Face checkpoints.
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
    """Mamba-2 or attention, then an MLP and experts, each part with its norm and its residual."""

    def __init__(self, config: GraniteHybridConfig, kind: str) -> None:
        super().__init__(config, kind)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.block_sparse_moe = SparseMLP(config.experts) if config.n_expert else None
        self.shared_mlp = MLP(config.attention)

    def inner(self, hidden: Tensor, *context: Any) -> Any:
        """(b, l, d_model) -> (b, l, d_model), and with `balanced` the experts' load (2, e)."""
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
        """The MLP and the experts, (b, l, d_model) -> (b, l, d_model)."""
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
        # The division of the logits, which the loss never holds.
        return super().finish(hidden) / self.config.logits_scaling  # (b, l, d_model)

    def deviation(self, module: str) -> float:
        """Of layers as muP has it: logits_scaling is how much wider than its first model it is."""
        width = 1.0 if module in (self.EMBEDDING, "lm_head") else self.config.logits_scaling
        return self.config.initializer_range / math.sqrt(width)
