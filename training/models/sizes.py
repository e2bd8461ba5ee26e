"""Sizes of each model family, checked on creation. No torch needed here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from training.errors import RequestError
from training.models import bounds
from training.ops.rope_scaling import RopeScaling

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh")
"""Activations that an MLP of Llama or Mistral may have, by their names in transformers."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes that every language model has; raises RequestError with all faults found."""

    family: ClassVar[str] = ""

    d_model: int
    n_layer: int
    vocab_size: int
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        # Check relations between sizes only if each size is valid on its own.
        if found := bounds.faults(self, self.least) or self.faults():
            raise RequestError.of(found)

    def least(self, name: str) -> int:
        """Return the minimum of a whole number."""
        return 1

    def faults(self) -> list[str]:
        """List the inconsistencies between sizes."""
        return []


@dataclass(frozen=True, kw_only=True)
class StateSpaceConfig(Sizes):
    """Sizes that Mamba-1 and Mamba-2 share."""

    tie_embeddings: bool = True
    d_conv: int = 4
    expand: int = 2
    bias: bool = False  # of the two outer projections
    conv_bias: bool = True
    residual_in_fp32: bool = True
    dt_min: float = 1e-3
    dt_max: float = 1e-1
    dt_init_floor: float = 1e-4

    @property
    def d_inner(self) -> int:
        return self.expand * self.d_model

    def faults(self) -> list[str]:
        if self.dt_min > self.dt_max:
            return [f"dt_min: {self.dt_min} must not be above dt_max {self.dt_max}"]
        return []


@dataclass(frozen=True, kw_only=True)
class MambaConfig(StateSpaceConfig):
    """Sizes of a Mamba-1 language model (Gu & Dao 2023, section 3.4 and appendix E.2)."""

    family: ClassVar[str] = "mamba"

    vocab_size: int = 50280  # GPT-NeoX's 50277 tokens, padded to a multiple of 8
    d_state: int = 16
    dt_rank: int = 0  # of delta's projection; 0: d_model / 16, rounded up

    @property
    def d_delta(self) -> int:
        """The rank of delta's projection."""
        return self.dt_rank or math.ceil(self.d_model / 16)

    def least(self, name: str) -> int:
        return 0 if name == "dt_rank" else 1


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(StateSpaceConfig):
    """Sizes of a Mamba-2 language model (Dao & Gu 2024, section 7)."""

    family: ClassVar[str] = "mamba2"

    vocab_size: int = 50288  # GPT-NeoX's 50277 tokens, padded to a multiple of 16
    d_state: int = 128
    head_dim: int = 64
    n_groups: int = 1  # heads of one group share B and C
    chunk_size: int = 256
    norm_across_groups: bool = False  # gated norm: one mean square for all channels, not per group
    dt_limit_low: float = 0.0  # minimum of delta after the softplus
    dt_limit_high: float = 0.0  # maximum of delta; 0: none

    @property
    def dt_limit(self) -> tuple[float, float]:
        """The minimum and maximum of delta."""
        return self.dt_limit_low, self.dt_limit_high or math.inf

    @property
    def is_limited(self) -> bool:
        return bool(self.dt_limit_low or self.dt_limit_high)

    @property
    def n_head(self) -> int:
        return self.d_inner // self.head_dim

    @property
    def d_conv_in(self) -> int:
        """Channels of the convolution: x, and B and C of every group."""
        return self.d_inner + 2 * self.n_groups * self.d_state

    def faults(self) -> list[str]:
        if self.d_inner % self.head_dim:
            return [f"head_dim: {self.head_dim} does not divide d_inner {self.d_inner}"]
        if self.n_head % self.n_groups:
            return [f"n_groups: {self.n_groups} does not divide the {self.n_head} heads"]
        low, high = self.dt_limit
        if not 0 <= low < high:
            return [f"dt_limit_low: {low} must be at least 0, and below dt_limit_high {high}"]
        return super().faults()


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(Sizes):
    """Sizes of a Llama language model (Touvron et al. 2023; Llama 3: Dubey et al. 2024)."""

    family: ClassVar[str] = "llama"

    vocab_size: int = 32000
    n_head: int
    n_kv_head: int  # fewer than n_head: grouped-query attention (Ainslie et al. 2023)
    d_ff: int
    head_dim: int = 0  # 0: d_model / n_head
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    hidden_act: str = "silu"  # of the MLP: one of ACTIVATIONS
    attention_bias: bool = False
    mlp_bias: bool = False
    context: int = 4096  # intended positions; written to other formats, not enforced here

    @property
    def d_head(self) -> int:
        return self.head_dim or self.d_model // self.n_head

    @property
    def d_rotary(self) -> int:
        """Channels of a head that rotate with the position."""
        return self.d_head

    @property
    def query_scale(self) -> float:
        """Factor on queries, in addition to attention's own 1 / sqrt(d_head)."""
        return 1.0

    def least(self, name: str) -> int:
        return 0 if name == "head_dim" else 1

    def faults(self) -> list[str]:
        found = []
        if not self.head_dim and self.d_model % self.n_head:
            found.append(f"n_head: {self.n_head} does not divide d_model {self.d_model}")
        elif self.d_rotary % 2:
            part = "head size" if self.d_rotary == self.d_head else "part of a head"
            found.append(f"n_head: rotary positions need an even {part}, not {self.d_rotary}")
        if self.n_head % self.n_kv_head:
            found.append(f"n_kv_head: {self.n_kv_head} does not divide n_head {self.n_head}")
        if self.hidden_act not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            found.append(f"hidden_act: must be one of {known}, not {self.hidden_act!r}")
        if self.rope_scaling is not None:
            found += self.rope_scaling.faults(self.d_rotary, self.rope_theta)
        return found


@dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """Llama with sliding-window attention over the last `window` positions (Jiang et al. 2023)."""

    family: ClassVar[str] = "mistral"

    window: int = 4096  # 0: all earlier positions

    def least(self, name: str) -> int:
        return 0 if name == "window" else super().least(name)


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(MistralConfig):
    """Mistral with experts in place of each MLP (Jiang et al. 2024, section 2)."""

    family: ClassVar[str] = "mixtral"

    window: int = 0
    n_expert: int = 8
    top_k: int = 2  # experts per token
    balance_coefficient: float = 0.0  # of the load-balancing loss (Fedus et al. 2021, section 2.2)

    def faults(self) -> list[str]:
        found = super().faults()
        if self.top_k > self.n_expert:
            found.append(f"top_k: {self.top_k} of only {self.n_expert} experts")
        if self.mlp_bias:
            found.append("mlp_bias: experts have none; fix: leave it out")
        if self.hidden_act != "silu":
            found.append(f"hidden_act: experts have silu only, not {self.hidden_act!r}")
        return found


@dataclass(frozen=True, kw_only=True)
class NeoXConfig(Sizes):
    """Sizes of a GPT-NeoX language model (Black et al. 2022, section 2)."""

    family: ClassVar[str] = "gpt_neox"

    vocab_size: int = 50432
    n_head: int
    d_ff: int
    rotary_pct: float = 0.25  # share of a head's channels that rotate
    rope_theta: float = 10000.0
    parallel_residual: bool = True  # attention and MLP see the same input
    attention_bias: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    context: int = 2048

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_head

    @property
    def d_rotary(self) -> int:
        return int(self.d_head * self.rotary_pct)

    def faults(self) -> list[str]:
        if self.d_model % self.n_head:
            return [f"n_head: {self.n_head} does not divide d_model {self.d_model}"]
        if not 0 <= self.rotary_pct <= 1:
            return [f"rotary_pct: must be from 0 to 1, not {self.rotary_pct}"]
        if self.d_rotary % 2:
            return [f"rotary_pct: {self.d_rotary} of {self.d_head} channels is an odd number"]
        return []
