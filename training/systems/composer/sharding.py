"""What Composer's FSDP is told: the file's settings, and how we compute. Light."""

from __future__ import annotations

from typing import Any

from training.systems.composer.sections import FsdpSection


def settings(
    fsdp: FsdpSection, *, bf16: bool, world_size: int, local_world_size: int
) -> dict[str, Any]:
    """Give the dictionary that Composer 0.23 and later take as parallelism_config["fsdp"].

    Weights are float32; with bf16 the units compute in bfloat16, and gradients are added up in
    float32. This is not left to Composer's own precision, which would also cast within our kernels.
    """
    found: dict[str, Any] = {
        "sharding_strategy": fsdp.sharding_strategy,
        "backward_prefetch": fsdp.backward_prefetch,
        "activation_checkpointing_reentrant": fsdp.activation_checkpointing_reentrant,
        "activation_checkpointing": fsdp.activation_checkpointing,
        "limit_all_gathers": fsdp.limit_all_gathers,
        "verbose": fsdp.verbose,
        "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "bf16"}
        if bf16
        else "FULL",
        "state_dict_type": "full",
    }
    if fsdp.process_group:
        found["process_group"] = fsdp.process_group
    elif fsdp.sharding_strategy == "HYBRID_SHARD":
        # Without these Composer makes one group of all ranks, and full sharding of it.
        found["data_parallel_shard_degree"] = local_world_size
        found["data_parallel_replicate_degree"] = world_size // local_world_size
    return found
