"""Code that models with several kinds of layers share: Mamba-2, attention, MLPs.

Shapes: b batch, l length, m d_model, v vocabulary size, r rotated channels of a head.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from training.models.hybrid_sizes import MAMBA, HybridConfig
from training.models.language import Block, LanguageModel, State, random_for, wide
from training.models.llama import Attention, turns
from training.models.mamba2 import Mamba2Mixer, initial_A_log
from training.models.mixers import initial_dt_bias
from training.ops.documents import Documents
from training.ops.norm import RMSNorm


def mix(
    mixer: nn.Module,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor | None,
    documents: Documents | None,
) -> Tensor:
    """Call a layer's mixer with the arguments that its kind takes, (b, l, m) -> (b, l, m)."""
    if isinstance(mixer, Attention):
        return mixer(hidden, cos, sin, mask, documents)  # (b, l, m)
    if isinstance(mixer, Mamba2Mixer):
        return mixer(hidden, mask, documents)  # (b, l, m)
    mixed: Tensor = mixer(hidden)  # (b, l, m)
    return mixed


class HybridLayer(Block):
    """A layer of one kind: a norm, a mixer with its residual, and whatever `finished` adds."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.residual_scale = config.residual_scale

    @property
    def part(self) -> nn.Module:
        """The module that mixes the positions, or the MLP in its place."""
        raise NotImplementedError

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the input of `part`, (b, l, m) -> (b, l, m)."""
        raise NotImplementedError

    def finished(self, hidden: Tensor) -> Tensor:
        """Apply the rest of the layer after `part`, (b, l, m) -> (b, l, m)."""
        return hidden

    def added(self, hidden: Tensor, branch: Tensor) -> Tensor:
        """Add a branch to the residual stream, both (b, l, m); float32 if residual_in_fp32."""
        stream = wide(hidden) if self.residual_in_fp32 else hidden  # (b, l, m)
        return stream + (branch if self.residual_scale == 1 else branch * self.residual_scale)

    def inner(self, hidden: Tensor, *context: Any) -> Any:
        """(b, l, m) -> (b, l, m); context is cos, sin, mask and documents."""
        mixed = mix(self.part, self.normed(hidden), *context)  # (b, l, m)
        return self.finished(self.added(hidden, mixed))  # (b, l, m)

    def start(self, batch: int, length: int) -> State:
        if isinstance(self.part, Attention):
            return self.part.start(batch, length)
        return self.part.start(batch) if isinstance(self.part, Mamba2Mixer) else {}

    def advance(self, hidden: Tensor, state: State) -> Tensor:
        seen = self.normed(hidden)  # (b, l, m)
        if isinstance(self.part, Attention | Mamba2Mixer):
            mixed = self.part.advance(seen, state)  # (b, l, m)
        else:
            mixed = self.part(seen)  # (b, l, m)
        return self.finished(self.added(hidden, mixed))  # (b, l, m)


class TwoPartLayer(HybridLayer):
    """A layer that starts with Mamba-2 or attention; subclasses add the second part."""

    def __init__(self, config: HybridConfig, kind: str) -> None:
        super().__init__(config)
        self.kind = kind
        self.input_layernorm = RMSNorm(config.d_model, config.norm_eps)
        if kind == MAMBA:
            self.mamba = Mamba2Mixer(config.mamba)
        else:
            self.self_attn = Attention(config.attention)

    @property
    def part(self) -> nn.Module:
        return self.mamba if self.kind == MAMBA else self.self_attn

    def normed(self, hidden: Tensor) -> Tensor:
        return self.input_layernorm(hidden)  # (b, l, m)


class Backbone(nn.Module):
    """Embedding, layers and final norm, under the names that checkpoints use."""

    def __init__(
        self, config: HybridConfig, embedding: str, layers: list[HybridLayer], norm: str
    ) -> None:
        super().__init__()
        self.add_module(embedding, nn.Embedding(config.vocab_size, config.d_model))
        self.layers = nn.ModuleList(layers)
        self.add_module(norm, RMSNorm(config.d_model, config.norm_eps))


class HybridModel(LanguageModel):
    """A language model with several kinds of layers."""

    BACKBONE: ClassVar[str] = "model"
    EMBEDDING: ClassVar[str] = "embed_tokens"
    NORM: ClassVar[str] = "norm"
    """Names of the parts in checkpoints."""

    def __init__(self, config: HybridConfig, layers: list[HybridLayer]) -> None:
        super().__init__()
        self.config: HybridConfig = config
        self.attention = config.attention
        self.add_module(self.BACKBONE, Backbone(config, self.EMBEDDING, layers, self.NORM))
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.tie({"lm_head.weight": f"{self.BACKBONE}.{self.EMBEDDING}.weight"})

    @property
    def blocks(self) -> list[Block]:
        # Cast without a check: sharding may have wrapped each block in another module.
        layers: Any = self.get_submodule(f"{self.BACKBONE}.layers")
        return cast("list[Block]", list(layers))

    @property
    def output(self) -> Tensor:
        return self.lm_head.weight  # (v, m)

    def embed(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.get_submodule(f"{self.BACKBONE}.{self.EMBEDDING}")(input_ids)
        return embedded  # (b, l, m)

    def context(
        self, hidden: Tensor, mask: Tensor | None, documents: Documents | None
    ) -> tuple[Any, ...]:
        """Return cos and sin (l, r), or (b, l, r) with documents, then the mask and the documents.

        Padding has positions like any token.
        """
        return (*turns(self.attention, hidden, documents=documents), mask, documents)

    def finish(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.get_submodule(f"{self.BACKBONE}.{self.NORM}")(hidden)
        return normed  # (b, l, m)

    def initial(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        """Draw weights from a normal distribution, but Mamba-2's own parameters as Mamba-2 does.

        The last weights of a residual branch are scaled down by the number of branches (GPT-2,
        section 2.3).
        """
        config, random = self.config, random_for(name, seed)
        owner, _, kind = name.rpartition(".")
        module = owner.rpartition(".")[2]
        if kind == "D" or module.endswith(("norm", "norm_f")):
            return torch.ones(shape)
        if kind in ("A_log", "dt_bias") or module == "conv1d":
            uniform = torch.rand(shape, generator=random)  # shape
            if kind == "A_log":
                return initial_A_log(uniform)  # (h,)
            if kind == "dt_bias":
                return initial_dt_bias(config.mamba, uniform)  # (h,)
            return (2 * uniform - 1) / math.sqrt(config.d_conv)  # shape
        if kind == "bias":
            return torch.zeros(shape)
        normal = torch.randn(shape, generator=random)  # shape
        ends = module in ("o_proj", "out_proj", "down_proj") or kind == "w2"
        depth = math.sqrt(config.branches * config.n_layer) if ends else 1.0
        return normal * (self.deviation(module) / depth)  # shape

    def deviation(self, module: str) -> float:
        """Return the standard deviation of the initial weights of a linear layer or embedding."""
        return self.config.initializer_range
