"""Sizes of models that mix different kinds of layers. No torch needed here.

A model's pattern has one letter per layer, as in Nemotron-H's configuration:

    M    Mamba-2        *    attention        -    an MLP alone

The layers reuse the blocks of the models that have only one kind. Those blocks take sizes of their
own, `mamba` and `attention`, which are derived from the hybrid's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from training.errors import RequestError
from training.models.sizes import LlamaConfig, Mamba2Config, MixtralConfig, Sizes

MAMBA, ATTENTION, MLP = "M", "*", "-"
LETTERS = {MAMBA: "Mamba-2", ATTENTION: "attention", MLP: "an MLP"}


@dataclass(frozen=True, kw_only=True)
class _Mamba(Mamba2Config):
    """Sizes of one Mamba-2 layer. Its heads set its inner width; `expand` does not."""

    heads: int

    @property
    def d_inner(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class _Attention(LlamaConfig):
    """Sizes of one attention layer: part of each head rotates, and scores have a factor."""

    turning: int
    multiplier: float

    @property
    def d_rotary(self) -> int:
        return self.turning

    @property
    def query_scale(self) -> float:
        return self.multiplier * math.sqrt(self.d_head)

    def least(self, name: str) -> int:
        return 0 if name == "turning" else super().least(name)


_OF_MAMBA = (
    *("d_model", "n_layer", "norm_eps", "d_state", "d_conv", "n_groups", "chunk_size", "bias"),
    *("norm_across_groups", "conv_bias", "dt_limit_low", "dt_limit_high"),
)
_OF_HEADS = ("d_model", "n_layer", "n_head", "n_kv_head", "head_dim")
_OF_ATTENTION = (*_OF_HEADS, "d_ff", "rope_theta", "attention_bias", "mlp_bias")
"""Fields that a hybrid shares with Mamba-2 and with Llama, under the same names."""


@dataclass(frozen=True, kw_only=True)
class HybridConfig(Sizes):
    """Sizes that all hybrids have, under the names that Mamba-2 and Llama use."""

    kinds: ClassVar[str] = MAMBA + ATTENTION
    """Letters that a pattern may contain."""
    branches: ClassVar[int] = 2
    """Residual branches per layer."""

    pattern: str  # one letter per layer
    n_head: int  # of attention; more than n_kv_head: grouped-query attention
    n_kv_head: int
    d_ff: int
    head_dim: int = 0  # of attention; 0: d_model / n_head
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10000.0
    context: int = 4096  # intended positions; written to other formats, not enforced here
    n_mamba_head: int
    mamba_head_dim: int = 64
    d_state: int = 128
    d_conv: int = 4
    n_groups: int = 1  # Mamba-2 heads of one group share B and C
    chunk_size: int = 256
    norm_across_groups: bool = False  # gated norm: one mean square for all channels, not per group
    bias: bool = False  # of Mamba-2's two outer projections
    conv_bias: bool = True
    residual_in_fp32: bool = True
    dt_limit_low: float = 0.0  # minimum of delta after the softplus
    dt_limit_high: float = 0.0  # maximum of delta; 0: none

    @property
    def d_head(self) -> int:
        """Channels of an attention head."""
        return self.head_dim or self.d_model // self.n_head

    @property
    def d_rotary(self) -> int:
        """Channels of an attention head that rotate with the position."""
        return 0

    @property
    def score_multiplier(self) -> float:
        """Factor on the products of queries and keys."""
        return max(1, self.d_head) ** -0.5  # d_head may be 0 here: `faults` reports that later

    @property
    def residual_scale(self) -> float:
        """Factor on a branch's result before it is added to the residual stream."""
        return 1.0

    @property
    def mamba(self) -> Mamba2Config:
        """The sizes of a Mamba-2 layer."""
        own: dict[str, Any] = {"heads": self.n_mamba_head, "head_dim": self.mamba_head_dim}
        return _Mamba(**{name: getattr(self, name) for name in _OF_MAMBA}, **own)

    @property
    def attention(self) -> LlamaConfig:
        """The sizes of an attention layer and of the MLP after it."""
        own: dict[str, Any] = {"turning": self.d_rotary, "multiplier": self.score_multiplier}
        return _Attention(**{name: getattr(self, name) for name in _OF_ATTENTION}, **own)

    def least(self, name: str) -> int:
        return 0 if name == "head_dim" else 1

    def faults(self) -> list[str]:
        found = []
        if strange := "".join(sorted(set(self.pattern) - set(self.kinds))):
            known = ", ".join(f"{one} ({LETTERS[one]})" for one in self.kinds)
            found.append(
                f"pattern: {strange!r} is not a kind of layer of {self.family}; it has {known}"
            )
        if len(self.pattern) != self.n_layer:
            found.append(
                f"pattern: has {len(self.pattern)} letters, but n_layer is {self.n_layer}; fix: "
                f"give a letter for each layer"
            )
        for part in ("mamba", "attention"):
            try:
                getattr(self, part)
            except RequestError as error:
                found += error.faults
        return found


@dataclass(frozen=True, kw_only=True)
class BambaConfig(HybridConfig):
    """Sizes of a Bamba model: Mamba-2 or attention, then an MLP (ibm-ai-platform/Bamba-9B)."""

    family: ClassVar[str] = "bamba"

    vocab_size: int = 128256
    norm_across_groups: bool = True

    @property
    def d_rotary(self) -> int:
        return self.d_head // 2  # Bamba's fixed fraction


@dataclass(frozen=True, kw_only=True)
class GraniteHybridConfig(HybridConfig):
    """Sizes of a Granite 4 H model: Mamba-2 or attention, then experts in parallel with an MLP.

    Four multipliers make the scale of activations independent of the model's width (Yang et al.
    2022, "Tensor Programs V", table 8).
    """

    family: ClassVar[str] = "granitemoehybrid"

    vocab_size: int = 100352
    tie_embeddings: bool = True
    norm_across_groups: bool = True
    context: int = 131072
    rotary: bool = False  # whether heads rotate with the position; no published model sets it
    n_expert: int = 0  # 0: no experts, only the MLP
    top_k: int = 0  # experts per token
    d_expert: int = 0  # width of an expert
    balance_coefficient: float = 0.0  # of the load-balancing loss (Fedus et al. 2021, section 2.2)
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 0.0  # of the scores; 0: 1 / d_head, as in all published models
    logits_scaling: float = 1.0  # divisor of the logits

    @property
    def d_rotary(self) -> int:
        return self.d_head if self.rotary else 0

    @property
    def score_multiplier(self) -> float:
        return self.attention_multiplier or 1 / max(1, self.d_head)

    @property
    def residual_scale(self) -> float:
        return self.residual_multiplier

    @property
    def experts(self) -> MixtralConfig:
        """The sizes of a layer's experts."""
        own: dict[str, Any] = {
            "d_ff": self.d_expert,
            "n_expert": self.n_expert,
            "top_k": self.top_k,
        }
        return MixtralConfig(**{name: getattr(self, name) for name in _OF_HEADS}, **own)

    def least(self, name: str) -> int:
        return 0 if name in ("n_expert", "top_k", "d_expert") else super().least(name)

    def faults(self) -> list[str]:
        found = super().faults()
        if bool(self.n_expert) != bool(self.top_k) or bool(self.n_expert) != bool(self.d_expert):
            found.append(
                f"n_expert: {self.n_expert}, top_k: {self.top_k} and d_expert: {self.d_expert} go "
                f"together; fix: give all three, or none for a model without experts"
            )
        elif self.top_k > self.n_expert:
            found.append(f"top_k: {self.top_k} of only {self.n_expert} experts")
        if self.balance_coefficient and not self.n_expert:
            found.append("balance_coefficient: there are no experts to balance; fix: leave it out")
        if self.mlp_bias:
            found.append("mlp_bias: this MLP has none; fix: leave it out")
        return found


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(HybridConfig):
    """Sizes of a Nemotron-H model (Blakeman et al. 2025, arXiv:2504.03624, section 2.1).

    Each layer is Mamba-2, attention without positions, or an MLP with squared ReLU.
    """

    family: ClassVar[str] = "nemotron_h"
    kinds: ClassVar[str] = MAMBA + ATTENTION + MLP
    branches: ClassVar[int] = 1

    vocab_size: int = 131072
    n_groups: int = 8
    chunk_size: int = 128
    context: int = 8192
    residual_in_fp32: bool = False
    # Transformers clamps delta to at least time_step_min and never uses time_step_limit.
    dt_limit_low: float = 1e-3
