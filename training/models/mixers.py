"""Everything that Mamba-1 and Mamba-2 share, which is all but their mixers.

Shapes: b batch, l length, m d_model, v vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from training.models.language import Block, LanguageModel, State, random_for, wide
from training.models.sizes import Mamba2Config, MambaConfig
from training.ops.documents import Documents
from training.ops.norm import RMSNorm

Config = MambaConfig | Mamba2Config


class Mixer(nn.Module):
    """The part of a block that mixes positions, between its norm and its residual."""

    def forward(self, hidden: Tensor, mask: Tensor | None, documents: Documents | None) -> Tensor:
        """(b, l, m) -> (b, l, m); mask (b, l) is False at padding."""
        raise NotImplementedError

    def start(self, batch: int) -> State:
        """Return the state before the first token. Its size is constant."""
        raise NotImplementedError

    def advance(self, hidden: Tensor, state: State) -> Tensor:
        """Compute `forward` for the next tokens, (b, l, m) -> (b, l, m), and update the state."""
        raise NotImplementedError


class MixerBlock(Block):
    """Norm, mixer and residual."""

    def __init__(self, config: Config, mixer: Mixer) -> None:
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.mixer = mixer

    def inner(
        self, hidden: Tensor, mask: Tensor | None = None, documents: Documents | None = None
    ) -> Tensor:
        """(b, l, m) -> (b, l, m), float32 if residual_in_fp32."""
        return self._residual(hidden) + self.mixer(self.norm(hidden), mask, documents)  # (b, l, m)

    def start(self, batch: int, length: int) -> State:
        return self.mixer.start(batch)

    def advance(self, hidden: Tensor, state: State) -> Tensor:
        mixed = self.mixer.advance(self.norm(hidden), state)  # (b, l, m)
        return self._residual(hidden) + mixed  # (b, l, m)

    def _residual(self, hidden: Tensor) -> Tensor:
        return wide(hidden) if self.residual_in_fp32 else hidden  # (b, l, m)


class Backbone(nn.Module):
    """Embedding, blocks and final norm, which the model calls itself."""

    def __init__(self, config: Config, mixer: Callable[[], Mixer]) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(MixerBlock(config, mixer()) for _ in range(config.n_layer))
        self.norm_f = RMSNorm(config.d_model, config.norm_eps)


class MixerModel(LanguageModel):
    """A language model of mixer blocks."""

    config: Config

    def __init__(self, config: Config, mixer: Callable[[], Mixer]) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config, mixer)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.tie({"lm_head.weight": "backbone.embeddings.weight"})

    @property
    def blocks(self) -> list[Block]:
        # Cast without a check: sharding may have wrapped each block in another module.
        return cast("list[Block]", list(self.backbone.layers))

    @property
    def output(self) -> Tensor:
        return self.lm_head.weight  # (v, m)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.backbone.embeddings(input_ids)  # (b, l, m)

    def context(
        self, hidden: Tensor, mask: Tensor | None, documents: Documents | None
    ) -> tuple[Tensor | None, Documents | None]:
        return mask, documents

    def finish(self, hidden: Tensor) -> Tensor:
        return self.backbone.norm_f(hidden)  # (b, l, m)

    def initial(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        """Return a parameter's initial value, as in state-spaces' own training.

        See Gu & Dao 2023, section 3.6 and appendix C: delta starts log-uniform in [dt_min, dt_max],
        and the out projection is scaled down by the depth (GPT-2).
        """
        c = self.config
        random = random_for(name, seed)
        owner, _, kind = name.rpartition(".")
        module = owner.rpartition(".")[2]
        if kind == "D" or module in ("norm", "norm_f"):
            return torch.ones(shape)
        if module in ("embeddings", "lm_head"):
            return torch.randn(shape, generator=random) * c.initializer_range  # (v, m)
        if module in ("in_proj", "out_proj") and kind == "bias":
            return torch.zeros(shape)
        uniform = torch.rand(shape, generator=random)  # shape
        if kind == "A_log":
            return self.initial_A_log(uniform)  # shape
        if kind == "dt_bias" or (module == "dt_proj" and kind == "bias"):
            return initial_dt_bias(c, uniform)  # shape
        fan_in = c.d_conv if module == "conv1d" else shape[-1]
        depth = math.sqrt(c.n_layer) if module == "out_proj" else 1.0
        return (2 * uniform - 1) / (math.sqrt(fan_in) * depth)  # shape

    def initial_A_log(self, uniform: Tensor) -> Tensor:  # noqa: N802
        """Return the initial log(-A), in the shape of `uniform`, which is in [0, 1)."""
        raise NotImplementedError


def initial_dt_bias(config: Config, uniform: Tensor) -> Tensor:
    """Return delta's initial bias: after the softplus, log-uniform in [dt_min, dt_max]."""
    low, high = math.log(config.dt_min), math.log(config.dt_max)
    dt = torch.exp(low + uniform * (high - low)).clamp(min=config.dt_init_floor)  # its shape
    return dt + torch.log(-torch.expm1(-dt))  # its shape, the inverse of softplus


def shown(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the padding, so that it does not affect the convolution and the state."""
    return x if mask is None else x * mask[..., None]  # (b, l, channels)
