"""Mixtral language model (Jiang et al. 2024, "Mixtral of Experts"): Mistral with sparse MLPs.

Glossary, beside that of training.models.llama, code name = the paper's symbol:
    e = n         experts                      k = K     experts that see a token (top_k)
    w1, w2, w3    an expert's three matrices, all experts' in one tensor
    gate = W_g    chooses the experts          t         tokens of the batch, b l

The experts have three tensors a layer, not three times n_expert: checkpoints name each expert's
own (block_sparse_moe.experts.E.w1.weight). All other names are those of training.models.llama.
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
    """The experts; what each token is given of them is the sum of those chosen for it."""

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
        """The same, and the gate's logits (t, e) and choices (t, k)."""
        x = hidden.flatten(0, 1)  # (t, d_model)
        weights, chosen, logits = route(x, self.gate.weight, self.top_k)  # (t, k | k | e)
        y = self.experts(x, weights, chosen)  # (t, d_model)
        return y.view_as(hidden), logits, chosen


class SparseLayer(Layer):
    """A layer of Mixtral: the same, with experts for the MLP."""

    mlp: SparseMLP

    @staticmethod
    def make_mlp(config: Any) -> nn.Module:
        return SparseMLP(config)

    def inner(self, hidden: Tensor, *context: Any) -> Any:
        """(b, l, d_model) -> (b, l, d_model), and with `balanced` the experts' load (2, e).

        The load is a result like any other: so it is recomputed, compiled and sharded with the
        block, and its gradient has the loss's scale, which one attached to the stream has not.
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
    """What models of layers with experts add to their loss, which learn to use all experts alike.

    The context that they give their layers ends with whether a layer gives its load too, as that of
    SparseLayer does.
    """

    config: Any  # sizes with top_k and balance_coefficient

    def context(
        self, hidden: Tensor, mask: Tensor | None, documents: Documents | None
    ) -> tuple[Any, ...]:
        """What the model gives otherwise, and that no block need give its load."""
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
        """As every model; in training mode the loss has balance_coefficient * balance loss added.

        Not when evaluating: there the loss is the cross-entropy, of which perplexity is made.
        The loads of all layers are one (as in transformers), of the rows that this rank reads, with
        the other ranks of its context group where they share these. With a `total`, the balance
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
