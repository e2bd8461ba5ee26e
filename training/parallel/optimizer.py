"""AdamW and gradient clipping, for sharded parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from training import compat
from training.config.config import OptimConfig


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Make AdamW; A_log, D, biases and norms are not decayed (Gu & Dao 2023, the reference's rule).

    With decay_all they are, as in systems without such a rule.
    """
    named = [(p, config.decay_all or decays(n)) for n, p in model.named_parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [p for p, decayed in named if decayed], "weight_decay": config.weight_decay},
        {"params": [p for p, decayed in named if not decayed], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]  # torch 2.2 cannot restore empty ones
    held = next(model.parameters()).device.type  # in host memory with cpu_offload
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=compat.fuses_adamw(held),
    )


def decays(name: str) -> bool:
    """Return whether weight decay applies to a parameter, by its name."""
    owner, _, kind = name.rpartition(".")
    plain = kind in ("A_log", "D") or kind.endswith("bias")  # Mamba-2 has a dt_bias
    return not plain and not owner.endswith(("norm", "norm_f"))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def clip_gradients(model: nn.Module, threshold: float) -> Tensor:
    """Scale all gradients to a global norm of at most `threshold`; return the norm before, ().

    A collective call: the norm is that of the whole model, whatever part of it a rank holds.
    """
    if isinstance(model, FullyShardedDataParallel):
        return _clip_fsdp1(model, threshold)  # ()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), threshold)  # ()
    return compat.full_value(norm)  # ()


def _clip_fsdp1(model: FullyShardedDataParallel, threshold: float) -> Tensor:
    """Clip as the model's own clip_grad_norm_ does, but sum in the order of the parameters.

    Torch 2.2 iterates over a set, whose order differs in every process, so that a restarted run
    would differ in the last digits.
    """
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    square = torch.zeros((), device=model.compute_device)  # ()
    for one in gradients:
        part = torch.linalg.vector_norm(one, dtype=torch.float32)  # ()
        square += part.square().to(square.device)
    if model.sharding_strategy != ShardingStrategy.NO_SHARD:
        dist.all_reduce(square, group=model.process_group)
    norm = square.sqrt()  # ()
    scale = (threshold / (norm + 1e-6)).clamp(max=1)  # ()
    for one in gradients:
        one.mul_(scale.to(one.device))
    return norm  # ()
