"""GPT-NeoX language model (Black et al. 2022, "GPT-NeoX-20B", section 2).

Glossary:
    b          batch size              l          sequence length
    d_model    width of the stream     h          heads
    d          channels of a head      r          rotated channels of a head (d_rotary)
    q, k, v    queries, keys, values   f          width of the MLP
    v (of logits)                      vocabulary size

Parameter names follow the Hugging Face checkpoints.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.models.language import Block, LanguageModel, State, random_for
from training.models.sizes import NeoXConfig
from training.ops.attention import attention, attention_from, start
from training.ops.documents import Documents
from training.ops.rotary import angles, rotate


class Attention(nn.Module):
    """Attention that rotates only part of the channels of queries and keys."""

    def __init__(self, config: NeoXConfig) -> None:
        super().__init__()
        self.config = config
        m, bias = config.d_model, config.attention_bias
        self.query_key_value = nn.Linear(m, 3 * m, bias=bias)  # q, k and v of the first head, ...
        self.dense = nn.Linear(m, m, bias=bias)

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        documents: Documents | None = None,
    ) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model); cos, sin (l, r) or (b, l, r), mask (b, l)."""
        q, k, v = self.heads(hidden, cos, sin)  # (b, l, h, d) each
        dropout = self.config.attention_dropout if self.training else 0.0
        o = attention(q, k, v, mask=mask, dropout=dropout, documents=documents)  # (b, l, h, d)
        return self.dense(o.flatten(2))  # (b, l, d_model)

    def heads(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, (b, l, h, d) each, with q and k rotated."""
        joined = self.query_key_value(hidden)  # (b, l, 3 d_model)
        heads = joined.unflatten(-1, (self.config.n_head, -1))  # (b, l, h, 3 d)
        q, k, v = heads.chunk(3, dim=-1)  # (b, l, h, d) each
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def advance(self, hidden: Tensor, state: State) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model), for the positions after those in the state."""
        cos, sin = turns(self.config, hidden, int(state["count"]))  # (l, r) both
        q, k, v = self.heads(hidden, cos, sin)  # (b, l, h, d) each
        o = attention_from(state, q, k, v)  # (b, l, h, d)
        return self.dense(o.flatten(2))  # (b, l, d_model)


class MLP(nn.Module):
    """Two linear layers with the exact GELU between them."""

    def __init__(self, config: NeoXConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.d_model, config.d_ff)
        self.dense_4h_to_h = nn.Linear(config.d_ff, config.d_model)

    def forward(self, hidden: Tensor) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model)."""
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(hidden)))  # (b, l, d_model)


class Layer(Block):
    """Attention and MLP, in parallel (parallel_residual) or one after the other."""

    def __init__(self, config: NeoXConfig) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = nn.LayerNorm(config.d_model, config.norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config)
        self.mlp = MLP(config)

    def inner(self, hidden: Tensor, *context: Any) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model); context is cos, sin, mask, documents."""
        seen = self.attention(self.input_layernorm(hidden), *context)  # (b, l, d_model)
        return self.joined(hidden, seen)  # (b, l, d_model)

    def joined(self, hidden: Tensor, seen: Tensor) -> Tensor:
        """Add attention's result and the MLP's to the residual stream; (b, l, d_model) all."""
        after = hidden + self.dropped(seen)  # (b, l, d_model)
        sees = hidden if self.config.parallel_residual else after  # (b, l, d_model)
        made = self.mlp(self.post_attention_layernorm(sees))  # (b, l, d_model)
        return after + self.dropped(made)  # (b, l, d_model)

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.hidden_dropout, self.training)  # (b, l, d_model)

    def start(self, batch: int, length: int) -> State:
        """Return an empty state: rotated keys and values; see training.ops.attention."""
        heads = (batch, self.config.n_head, self.config.d_head)
        return start(self.attention.dense.weight, heads, length, window=0)

    def advance(self, hidden: Tensor, state: State) -> Tensor:
        seen = self.attention.advance(self.input_layernorm(hidden), state)  # (b, l, d_model)
        return self.joined(hidden, seen)  # (b, l, d_model)


class Backbone(nn.Module):
    """Embedding, layers and final norm; exists only for the parameter names of checkpoints."""

    def __init__(self, config: NeoXConfig) -> None:
        super().__init__()
        self.embed_in = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.final_layer_norm = nn.LayerNorm(config.d_model, config.norm_eps)


class NeoX(LanguageModel):
    """The language model; dropout applies in training mode only."""

    def __init__(self, config: NeoXConfig) -> None:
        super().__init__()
        self.config: NeoXConfig = config
        self.gpt_neox = Backbone(config)
        self.embed_out = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.tie({"embed_out.weight": "gpt_neox.embed_in.weight"})

    @property
    def blocks(self) -> list[Block]:
        # Cast without a check: sharding may have wrapped each block in another module.
        return cast("list[Block]", list(self.gpt_neox.layers))

    @property
    def output(self) -> Tensor:
        return self.embed_out.weight  # (v, d_model)

    def embed(self, input_ids: Tensor) -> Tensor:
        hidden = self.gpt_neox.embed_in(input_ids)  # (b, l, d_model)
        return F.dropout(hidden, self.config.hidden_dropout, self.training)  # (b, l, d_model)

    def context(
        self, hidden: Tensor, mask: Tensor | None, documents: Documents | None
    ) -> tuple[Any, ...]:
        """Return cos and sin (l, r), or (b, l, r) with documents, then the mask and the documents.

        Padding has positions like any token.
        """
        return (*turns(self.config, hidden, documents=documents), mask, documents)

    def finish(self, hidden: Tensor) -> Tensor:
        return self.gpt_neox.final_layer_norm(hidden)  # (b, l, d_model)

    def initial(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        """Normal; a branch's last weights are scaled down by the depth (GPT-2, section 2.3)."""
        owner, _, kind = name.rpartition(".")
        module = owner.rpartition(".")[2]
        if kind == "bias":
            return torch.zeros(shape)
        if module.endswith("norm"):
            return torch.ones(shape)
        normal = torch.randn(shape, generator=random_for(name, seed))  # shape
        ends = module in ("dense", "dense_4h_to_h")
        depth = math.sqrt(2 * self.config.n_layer) if ends else 1.0
        return normal * (self.config.initializer_range / depth)  # shape


def turns(
    config: NeoXConfig, hidden: Tensor, first: int = 0, documents: Documents | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin (l, r) for the positions of hidden (b, l, d_model), counted from `first`.

    With documents: (b, l, r), counted from the start of each document.
    """
    positions = torch.arange(first, first + hidden.shape[1], device=hidden.device)  # (l,)
    if documents is not None:
        positions = documents.positions  # (b, l)
    return angles(positions, config.d_rotary, config.rope_theta)
