"""Llama and Mistral language models (Touvron et al. 2023, Dubey et al. 2024, Jiang et al. 2023).

Glossary, code name = the papers' symbol:
    b                  batch size              l                  sequence length
    d_model = dim      width of the stream     n_layer = n_layers blocks
    h = n_heads        heads of the queries    g = n_kv_heads     heads of keys and values
    d = head_dim       channels of a head      f = hidden_dim     width of the MLP
    r                  rotated channels of a head (d_rotary): all of them in Llama and Mistral
    q, k, v            queries, keys, values   window             positions that Mistral attends to
    v (of logits)      vocabulary size

Parameter names follow the Hugging Face checkpoints.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.models.language import Block, LanguageModel, State, random_for
from training.models.sizes import LlamaConfig, MistralConfig
from training.ops.attention import attention, attention_from, start
from training.ops.documents import Documents
from training.ops.norm import RMSNorm
from training.ops.rotary import angles, rotate


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.window = config.window if isinstance(config, MistralConfig) else 0
        d, bias = config.d_head, config.attention_bias
        self.q_proj = nn.Linear(config.d_model, config.n_head * d, bias=bias)
        self.k_proj = nn.Linear(config.d_model, config.n_kv_head * d, bias=bias)
        self.v_proj = nn.Linear(config.d_model, config.n_kv_head * d, bias=bias)
        self.o_proj = nn.Linear(config.n_head * d, config.d_model, bias=bias)

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        documents: Documents | None = None,
    ) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model); cos, sin (l, r) or (b, l, r), mask (b, l)."""
        q, k, v = self.heads(hidden, cos, sin)  # (b, l, h | g | g, d)
        o = attention(q, k, v, window=self.window, mask=mask, documents=documents)  # (b, l, h, d)
        return self.o_proj(o.flatten(2))  # (b, l, d_model)

    def heads(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (b, l, h, d), k and v (b, l, g, d), with q and k rotated."""
        d, scale = self.config.d_head, self.config.query_scale
        q = self.q_proj(hidden).unflatten(-1, (-1, d))  # (b, l, h, d)
        q = q if scale == 1 else q * scale  # (b, l, h, d)
        k = self.k_proj(hidden).unflatten(-1, (-1, d))  # (b, l, g, d)
        v = self.v_proj(hidden).unflatten(-1, (-1, d))  # (b, l, g, d)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def start(self, batch: int, length: int) -> State:
        """Return an empty state: rotated keys and values; see training.ops.attention."""
        heads = (batch, self.config.n_kv_head, self.config.d_head)
        return start(self.k_proj.weight, heads, length, self.window)

    def advance(self, hidden: Tensor, state: State) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model), for the positions after those in the state."""
        cos, sin = turns(self.config, hidden, int(state["count"]))  # (l, r) both
        q, k, v = self.heads(hidden, cos, sin)  # (b, l, h | g | g, d)
        o = attention_from(state, q, k, v, window=self.window)  # (b, l, h, d)
        return self.o_proj(o.flatten(2))  # (b, l, d_model)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    # Two names for one approximation (Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2).
    "gelu_new": functools.partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}


class MLP(nn.Module):
    """SwiGLU, or GEGLU with a GELU as hidden_act (Shazeer 2020)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[config.hidden_act]
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """(b, l, d_model) -> (b, l, d_model)."""
        gate = self.activation(self.gate_proj(hidden))  # (b, l, f)
        gated = gate * self.up_proj(hidden)  # (b, l, f)
        return self.down_proj(gated)  # (b, l, d_model)


class Layer(Block):
    """Attention and MLP, each pre-normed and with a residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = self.make_mlp(config)

    @staticmethod
    def make_mlp(config: Any) -> nn.Module:
        """Make the module after the attention."""
        return MLP(config)

    def inner(self, hidden: Tensor, *context: Any) -> Any:
        """(b, l, d_model) -> (b, l, d_model); context is cos, sin, mask, documents."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), *context)  # (b, l, d_model)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # (b, l, d_model)

    def start(self, batch: int, length: int) -> State:
        return self.self_attn.start(batch, length)

    def advance(self, hidden: Tensor, state: State) -> Tensor:
        seen = self.self_attn.advance(self.input_layernorm(hidden), state)  # (b, l, d_model)
        hidden = hidden + seen  # (b, l, d_model)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # (b, l, d_model)


class Backbone(nn.Module):
    """Embedding, layers and final norm; exists only for the parameter names of checkpoints."""

    def __init__(self, config: LlamaConfig, layer: type[Layer]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(layer(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.d_model, config.norm_eps)


class Llama(LanguageModel):
    """The language model; Mistral adds a window. The stream has the dtype of the parameters."""

    def __init__(self, config: LlamaConfig, layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.config: LlamaConfig = config
        self.model = Backbone(config, layer)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.tie({"lm_head.weight": "model.embed_tokens.weight"})

    @property
    def blocks(self) -> list[Block]:
        # Cast without a check: sharding may have wrapped each block in another module.
        return cast("list[Block]", list(self.model.layers))

    @property
    def output(self) -> Tensor:
        return self.lm_head.weight  # (v, d_model)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)  # (b, l, d_model)

    def context(
        self, hidden: Tensor, mask: Tensor | None, documents: Documents | None
    ) -> tuple[Any, ...]:
        """Return cos and sin (l, r), or (b, l, r) with documents, then the mask and the documents.

        Padding has positions like any token.
        """
        return (*turns(self.config, hidden, documents=documents), mask, documents)

    def finish(self, hidden: Tensor) -> Tensor:
        return self.model.norm(hidden)  # (b, l, d_model)

    def initial(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        """Normal; a branch's last weights are scaled down by the depth (GPT-2, section 2.3)."""
        owner, _, kind = name.rpartition(".")
        module = owner.rpartition(".")[2]
        if kind == "bias":
            return torch.zeros(shape)
        if module.endswith("norm"):
            return torch.ones(shape)
        normal = torch.randn(shape, generator=random_for(name, seed))  # shape
        ends = module in ("o_proj", "down_proj") or kind == "w2"
        depth = math.sqrt(2 * self.config.n_layer) if ends else 1.0
        return normal * (self.config.initializer_range / depth)  # shape


def turns(
    config: LlamaConfig, hidden: Tensor, first: int = 0, documents: Documents | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin (l, r) for the positions of hidden (b, l, d_model), counted from `first`.

    With documents: (b, l, r), counted from the start of each document.
    """
    length = first + hidden.shape[1]
    positions = torch.arange(first, length, device=hidden.device)  # (l,)
    if documents is not None:
        positions, length = documents.positions, documents.length  # (b, l)
    return angles(positions, config.d_rotary, config.rope_theta, config.rope_scaling, length)
