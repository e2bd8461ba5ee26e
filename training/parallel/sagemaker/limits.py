"""Limits of the library's backend, checked before training."""

from __future__ import annotations

import importlib.util

import torch

from training.config.config import Config
from training.errors import RequestError
from training.parallel import float8
from training.parallel.memory import compute_dtype
from training.process_group import Group

FAMILIES = ("llama", "mistral", "mixtral", "gpt_neox")


def check(config: Config, group: Group) -> None:
    """Raise RequestError with all faults."""
    parallel, found = config.parallel, []
    if config.model.sizes.family not in FAMILIES:
        found.append(f"backend: smp trains {', '.join(FAMILIES)}, not {config.model.sizes.family}")
    if parallel.fsdp_engine == "fsdp2":
        found.append("fsdp_engine: the library uses FSDP1; fix: use auto")
    for name, wanted in (
        ("cpu_offload", parallel.cpu_offload),
        ("use_torch_compile", parallel.use_torch_compile),
        ("selective_checkpointing", parallel.selective_checkpointing > 1),
        ("checkpointing_policy", parallel.checkpointing_policy != "full"),
        ("position_weighting", config.data.position_weighting),
        ("reset_documents", config.data.reset_documents),
    ):
        if wanted:
            found.append(f"{name}: backend=smp has none; fix: leave it out, or use backend=fsdp")
    ranks = parallel.tensor_parallel
    if ranks > 1 and not parallel.smp_transform:
        found.append("smp_transform: only the library's own layers can be shared; fix: use True")
    if group.world_size % ranks:
        found.append(
            f"tensor_parallel: {group.world_size} ranks cannot be cut into groups of {ranks}"
        )
    elif parallel.shard_group_size and group.world_size % parallel.shard_group_size:
        found.append(
            f"shard_group_size: {group.world_size} ranks cannot be cut into groups of "
            f"{parallel.shard_group_size}"
        )
    if config.run.final_model_dir and parallel.smp_transform:
        found.append(
            "final_model_dir: checkpoints of the library's own layers have names of its own, which "
            "cannot be converted; fix: use smp_transform=False"
        )
    if found:
        raise RequestError.of(found)


def fp8_obstacle(config: Config, device: torch.device) -> str:
    """Return why products cannot be in float8, or an empty string."""
    if not config.parallel.smp_transform:
        return "only the library's own layers have it (smp_transform)"
    if config.parallel.fsdp_activation_checkpointing:
        return (
            "blocks are recomputed, and transformer_engine's float8 does not work with torch's way"
        )
    if device.type != "cuda":
        return "this is not a GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < float8.LEAST:
        return f"this GPU has compute capability {capability[0]}.{capability[1]}, but it needs 8.9"
    if compute_dtype(config.parallel.precision, device) != torch.bfloat16:
        return "the blocks compute in float32, but it needs bfloat16"
    if importlib.util.find_spec("transformer_engine") is None:
        return "the library transformer_engine is not installed"
    return ""
