"""Stands in for torch.sagemaker.tensor_parallel.transformer: see the folder above."""

from __future__ import annotations

from transformers.models.llama.modeling_llama import LlamaDecoderLayer

TransformerLayer = LlamaDecoderLayer
"""A layer class that `transform` leaves unchanged."""
