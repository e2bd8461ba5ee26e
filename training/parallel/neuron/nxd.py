"""The same layers from neuronx_distributed, for Neuron devices.

Its linear layers overlap communication with the products. Written against the documentation of
neuronx_distributed 0.10, which is not available where this project's tests run: these calls have
only been checked against a record of its signatures (tests/training/parallel/neuron_contract).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from training.ops.loss import IGNORED, counted
from training.parallel.neuron.layers import Layers
from training.parallel.share import Share

_PACKAGE = "neuronx_distributed.parallel_layers"


def is_there() -> bool:
    """Return whether the library is installed; the public index has a placeholder of its name."""
    try:
        importlib.import_module(_PACKAGE)
    except ImportError:
        return False
    return True


def shares(tensor_parallel: int) -> tuple[Share, Share]:
    """Let the library divide the ranks; return the tensor group and the data-parallel group."""
    state = importlib.import_module(f"{_PACKAGE}.parallel_state")
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    return (
        Share(
            state.get_tensor_model_parallel_rank(),
            state.get_tensor_model_parallel_size(),
            state.get_tensor_model_parallel_group(),
        ),
        Share(
            state.get_data_parallel_rank(),
            state.get_data_parallel_size(),
            state.get_data_parallel_group(),
        ),
    )


class NxdLayers(Layers):
    """Makes neuronx_distributed's layers; all parameters are filled afterwards."""

    def __init__(self, share: Share) -> None:
        super().__init__(share)
        self._layers = importlib.import_module(f"{_PACKAGE}.layers")
        self._mappings = importlib.import_module(f"{_PACKAGE}.mappings")
        self._losses = importlib.import_module(f"{_PACKAGE}.loss_functions")

    def column(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        layer: nn.Module = self._layers.ColumnParallelLinear(
            inputs, outputs, bias=bias, gather_output=False
        )
        return layer

    def row(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        layer: nn.Module = self._layers.RowParallelLinear(
            inputs, outputs, bias=bias, input_is_parallel=True
        )
        return layer

    def embedding(self, rows: int, channels: int) -> nn.Module:
        layer: nn.Module = self._layers.ParallelEmbedding(rows, channels)
        return layer

    def loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        total: Tensor | None,
    ) -> Tensor:
        hidden = self._mappings.copy_to_tensor_model_parallel_region(hidden)  # (b, l, m)
        logits = (hidden @ weight.t()).float()  # (b, l, v / N)
        counts = targets != IGNORED  # (b, l)
        losses: Any = self._losses.parallel_cross_entropy(
            logits, torch.where(counts, targets, 0)
        )  # (b, l)
        shares = counts.float() if weights is None else counts * weights  # (b, l)
        if total is None:
            total = counted(targets, weights).clamp(min=1e-30)  # ()
        return (losses * shares).sum() / total  # ()
