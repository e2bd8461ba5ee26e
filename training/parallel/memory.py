"""What is traded for memory or speed must be had: by this device, this torch, this model."""

from __future__ import annotations

import torch

from training import compat
from training.config.config import Config
from training.errors import RequestError
from training.parallel.auto import compute_dtype, uses_fsdp2


def check(config: Config, device: torch.device) -> None:
    """Raise RequestError with all faults that need torch, or the device, to be found."""
    parallel = config.parallel
    fsdp2 = uses_fsdp2(parallel.fsdp_engine)
    found = []
    if parallel.checkpointing_policy == "selective" and compat.selective_contexts() is None:
        found.append(
            f"checkpointing_policy: selective takes torch 2.4 or later, this is "
            f"{torch.__version__}; use full"
        )
    if fsdp2 and not parallel.limit_all_gathers:
        found.append("limit_all_gathers: FSDP2 always limits them; use fsdp_engine=fsdp1 for False")
    if fsdp2 and parallel.backward_prefetch == "post":
        found.append(
            "backward_prefetch: FSDP2 always gathers before a block's gradients; use pre, or "
            "fsdp_engine=fsdp1"
        )
    narrow = compute_dtype(parallel.precision, device) == torch.bfloat16
    if parallel.reduce_precision == "bf16" and not narrow:
        found.append(
            f"reduce_precision: bf16 would round the gradients of float32 "
            f"(precision={parallel.precision} on {device.type}); use auto or fp32"
        )
    if device.type == "cpu":
        found += [
            f"{name}: on a CPU everything is in the host's memory already; leave it out"
            for name in ("offload_activations", "cpu_offload")
            if getattr(parallel, name)
        ]
    horizon, blocks = parallel.activation_loading_horizon, config.model.sizes.n_layer
    if parallel.offload_activations and horizon >= blocks:
        found.append(
            f"activation_loading_horizon: {horizon} blocks ahead are all that a model of {blocks} "
            "has, so nothing would leave; use less, or leave out offload_activations"
        )
    if parallel.cpu_offload and not fsdp2 and config.data.gradient_accumulation > 1:
        found.append(
            "cpu_offload: FSDP1 does not add up gradients that are in the host's memory; use "
            "gradient_accumulation=1, or FSDP2"
        )
    if found:
        raise RequestError.of(found)
