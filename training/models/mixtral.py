"""Mixtral language model (Jiang et al. 2024, "Mixtral of Experts"): Mistral with sparse MLPs.

Glossary, in addition to that of training.models.llama, code name = the paper's symbol:
    e = n         experts                      k = K     experts per token (top_k)
    w1, w2, w3    an expert's three matrices; one tensor holds those of all experts
    gate = W_g    chooses the experts          t         tokens of the batch, b l

A layer has three tensors for its experts, not three per expert: checkpoints store each expert's
separately (block_sparse_moe.experts.E.w1.weight). Other names are those of training.models.llama.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from training.models.language import LanguageModel
from training.models.llama import Layer, Llama
from training.models.sizes import MixtralConfig
from training.ops.documents import Documents
from training.ops.loss import counted
from training.ops.route import balance_loss, experts, load, route


class Experts(nn.Module):
    """The experts; a token's result is the weighted sum of those chosen for it."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        e, m, f = config.n_expert, config.d_model, config.d_ff
        self.w1 = nn.Parameter(torch.empty(e, f, m))  # (e, f, m)
        self.w2 = nn.Parameter(torch.empty(e, m, f))  # (e, m, f)
        self.w3 = nn.Parameter(torch.empty(e, f, m))  # (e, f, m)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """(t, d_model), (t, k), (t, k) -> (t, d_model)."""
        return experts(x, weights, chosen, self.w1, self.w3, self.w2)  # (t, d_model)


class SparseMLP(nn.Module):
    """Each token goes through the `top_k` experts that the gate chooses for it."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.gate = nn.Linear(config.d_model, config.n_expert, bias=False)
        self.experts = Experts(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model)."""
        return self.routed(hidden)[0]  # (b, l, d_model)

    def routed(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute `forward`, and return the gate's logits (t, e) and choices (t, k) as well."""
        x = hidden.flatten(0, 1)  # (t, d_model)
        weights, chosen, logits = route(x, self.gate.weight, self.top_k)  # (t, k | k | e)
        y = self.experts(x, weights, chosen)  # (t, d_model)
        return y.view_as(hidden), logits, chosen


class SparseLayer(Layer):
    """A Mixtral layer: Mistral's, with experts instead of the MLP."""

    mlp: SparseMLP

    @staticmethod
    def make_mlp(config: Any) -> nn.Module:
        return SparseMLP(config)

    def inner(self, hidden: Tensor, *context: Any) -> Any:
        """(b, l, d_model) -> (b, l, d_model), plus the experts' load (2, e) if `balanced`.

        The load is an ordinary result, so it is recomputed, compiled and sharded with the block,
        and its gradient has the loss's scale, unlike that of a loss attached to the stream.
        """
        *given, balanced = context  # cos, sin, mask, documents
        if not balanced:
            return super().inner(hidden, *given)  # (b, l, d_model)
        mask = given[2]  # (b, l)
        seen = self.self_attn(self.input_layernorm(hidden), *given)  # (b, l, d_model)
        hidden = hidden + seen  # (b, l, d_model)
        x = self.post_attention_layernorm(hidden)  # (b, l, d_model)
        y, logits, chosen = self.mlp.routed(x)  # (b, l, d_model), (t, e), (t, k)
        counts = None if mask is None else mask.flatten()  # (t,)
        return hidden + y, load(logits, chosen, counts)  # (b, l, d_model), (2, e)


class BalancedModel(LanguageModel):
    """Adds a load-balancing loss to models with experts, so that they learn to use all experts.

    The context of their layers ends with a flag: whether a layer also returns its load, as
    SparseLayer does.
    """

    config: Any  # sizes with top_k and balance_coefficient

    def context(
        self, hidden: Tensor, mask: Tensor | None, documents: Documents | None
    ) -> tuple[Any, ...]:
        """Return the model's usual context, with a flag that no block need return its load."""
        return (*super().context(hidden, mask, documents), False)

    def compute(
        self,
        input_ids: Tensor,
        targets: Tensor | None,
        mask: Tensor | None,
        weights: Tensor | None,
        total: Tensor | None,
        documents: Documents | None,
    ) -> Tensor:
        """Compute as every model does; in training mode add balance_coefficient * the balance loss.

        In evaluation the loss is the cross-entropy alone, from which perplexity is computed. The
        loads of all layers are summed (as in transformers), over the rows that this rank reads, and
        over the ranks of its context group, which share those rows. Given a `total`, the balance
        loss is scaled as the cross-entropy is: by the share of these targets.
        """
        coefficient = self.config.balance_coefficient
        if targets is None or not self.training or not coefficient:
            return super().compute(input_ids, targets, mask, weights, total, documents)
        hidden = self.embed(input_ids)  # (b, l, d_model)
        *context, _ = self.context(hidden, mask, documents)
        loads = []
        for block in self.blocks:
            hidden, one = block(hidden, *context, True)  # (b, l, d_model), (2, e)
            loads.append(one)
        hidden = self.finish(hidden)  # (b, l, d_model)
        loss = self.loss(hidden, targets, weights, total)  # ()
        loaded = torch.stack(loads).sum(0)  # (2, e)
        if self.context_group is not None:
            loaded = self.context_group.total(loaded)  # (2, e)
        balance = balance_loss(loaded, self.config.top_k)  # ()
        share = 1.0 if total is None else counted(targets, weights) / total  # ()
        return loss + coefficient * share * balance  # ()


class Mixtral(BalancedModel, Llama):
    """The language model."""

    config: MixtralConfig

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__(config, SparseLayer)
