"""Layers of which each rank has its own part."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from neuronx_distributed.parallel_layers import mappings
from torch import Tensor, nn


class ColumnParallelLinear(nn.Module):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        stride: int = 1,
        init_method: Any = None,
        sequence_parallel_enabled: bool = False,
    ) -> None:
        super().__init__()
        assert not gather_output and stride == 1 and not sequence_parallel_enabled
        own = output_size // mappings.share().size
        self.weight = nn.Parameter(torch.empty(own, input_size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(own, dtype=dtype)) if bias else None

    def forward(self, input_: Tensor) -> Tensor:
        entered = mappings.copy_to_tensor_model_parallel_region(input_)
        return F.linear(entered, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        stride: int = 1,
        init_method: Any = None,
        sequence_parallel_enabled: bool = False,
    ) -> None:
        super().__init__()
        assert input_is_parallel and stride == 1 and not sequence_parallel_enabled
        own = input_size // mappings.share().size
        self.weight = nn.Parameter(torch.empty(output_size, own, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(output_size, dtype=dtype)) if bias else None

    def forward(self, input_: Tensor) -> Tensor:
        y = mappings.reduce_from_tensor_model_parallel_region(F.linear(input_, self.weight))
        return y if self.bias is None else y + self.bias


class ParallelEmbedding(nn.Module):
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        init_method: Any = None,
        device: Any = None,
        dtype: torch.dtype = torch.float32,
        shard_across_embedding: bool = False,
    ) -> None:
        super().__init__()
        assert padding_idx is None and not shard_across_embedding
        self.own = num_embeddings // mappings.share().size
        self.weight = nn.Parameter(torch.empty(self.own, embedding_dim, dtype=dtype))

    def forward(self, input_: Tensor) -> Tensor:
        local = input_ - mappings.share().rank * self.own
        is_own = (local >= 0) & (local < self.own)
        found = F.embedding(local.clamp(0, self.own - 1), self.weight) * is_own[..., None]
        return mappings.reduce_from_tensor_model_parallel_region(found)
