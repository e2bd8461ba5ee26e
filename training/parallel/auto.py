"""What `auto` comes to, on this torch and this device."""

from __future__ import annotations

import torch

from training import compat
from training.errors import RequestError


def uses_fsdp2(engine: str) -> bool:
    """Choose the engine; RequestError if FSDP2 is asked for and this torch has none."""
    if engine == "fsdp2" and compat.fsdp2() is None:
        raise RequestError(f"fsdp_engine: torch {torch.__version__} has no FSDP2; use auto")
    return engine != "fsdp1" and compat.fsdp2() is not None


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Choose bfloat16 or float32; auto is bfloat16 on a GPU that has it."""
    has_bf16 = device.type == "cpu" or torch.cuda.is_bf16_supported()
    if precision == "bf16" and not has_bf16:
        raise RequestError("precision: this GPU has no bfloat16; use precision=fp32")
    wanted = precision == "bf16" or (precision == "auto" and device.type == "cuda" and has_bf16)
    return torch.bfloat16 if wanted else torch.float32
