"""Rotary positions: each pair of a head's channels turns by an angle that grows with the position.

Su et al. 2021 ("RoFormer"), section 3.2.2: pair i of position p turns by p * theta^(-2 i / d).
The pair of channel i is channel i + d / 2, as in the checkpoints of Hugging Face (the paper has
them side by side), so the angles of a position are written twice.

Shapes: b batch, l length, h heads, d channels of a head, r channels that turn.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from training.ops.rope_scaling import RopeScaling


def angles(
    positions: Tensor, d: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, (l), d -> (l, d) both, always float32.

    d is even. In bfloat16 positions above 256 could not be told from their neighbours.
    """
    pairs = torch.arange(0, d, 2, device=positions.device, dtype=torch.float32)  # (d / 2,)
    frequencies = 1.0 / theta ** (pairs / d)  # (d / 2,)
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling)  # (d / 2,)
    turned = positions.float()[:, None] * frequencies  # (l, d / 2)
    both = torch.cat((turned, turned), dim=-1)  # (l, d)
    return both.cos(), both.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first r channels of every head, (b, l, h, d) -> (b, l, h, d), r <= d.

    cos, sin (l, r). Computed in float32 (float64 for float64 inputs); the result has x's dtype.
    """
    d, r = x.shape[-1], cos.shape[-1]
    turned, rest = x.split([r, d - r], dim=-1)  # (b, l, h, r), (b, l, h, d - r)
    first, second = turned.chunk(2, dim=-1)  # (b, l, h, r / 2) twice
    across = torch.cat((-second, first), dim=-1)  # (b, l, h, r)
    # cos and sin are float32, and so are the products of anything narrower.
    turned = (turned * cos[:, None] + across * sin[:, None]).to(x.dtype)  # (b, l, h, r)
    return turned if r == d else torch.cat((turned, rest), dim=-1)  # (b, l, h, d)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow the frequencies, (d / 2) -> (d / 2); see RopeScaling."""
    slow = frequencies / scaling.factor  # (d / 2,)
    if scaling.kind == "linear":
        return slow
    # How often a pair turns within the context of the first training: seldom (1) to often (4).
    turns = scaling.original_context * frequencies / (2 * math.pi)  # (d / 2,)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # (d / 2,)
    return torch.lerp(slow, frequencies, keep)  # (d / 2,)
