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
    positions: Tensor,
    d: int,
    theta: float,
    scaling: RopeScaling | None = None,
    length: int = 0,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, (l), d -> (l, d) both, always float32.

    Positions (b, l), which begin anew with each document, give (b, l, d). d is even. length:
    positions of the text up to here, which some kinds of scaling go by. In bfloat16 positions above
    256 could not be distinguished from their neighbours.
    """
    if scaling is not None and scaling.kind == "dynamic":
        theta = _raised(theta, d, scaling, length)
    pairs = torch.arange(0, d, 2, device=positions.device, dtype=torch.float32)  # (d / 2,)
    frequencies = 1.0 / theta ** (pairs / d)  # (d / 2,)
    size = 1.0
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling, theta, length)  # (d / 2,)
        size = _size(scaling)
    turned = positions.float()[..., None] * frequencies  # (l, d / 2) or (b, l, d / 2)
    both = torch.cat((turned, turned), dim=-1)  # (l, d) or (b, l, d)
    return both.cos() * size, both.sin() * size


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first r channels of every head, (b, l, h, d) -> (b, l, h, d), r <= d.

    cos, sin (l, r) or (b, l, r). Computed in float32 (float64 for float64 inputs); the result has
    x's dtype.
    """
    d, r = x.shape[-1], cos.shape[-1]
    if r == 0:
        return x
    turned, rest = x.split([r, d - r], dim=-1)  # (b, l, h, r), (b, l, h, d - r)
    first, second = turned.chunk(2, dim=-1)  # (b, l, h, r / 2) twice
    across = torch.cat((-second, first), dim=-1)  # (b, l, h, r)
    # cos and sin are float32, and so are the products of anything narrower.
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (l, 1, r) or (b, l, 1, r)
    turned = (turned * cos + across * sin).to(x.dtype)  # (b, l, h, r)
    return turned if r == d else torch.cat((turned, rest), dim=-1)  # (b, l, h, d)


def _raised(theta: float, d: int, scaling: RopeScaling, length: int) -> float:
    """Dynamic: the theta that goes with so many positions; the same up to the first context."""
    stretch = max(length, scaling.original_context) / scaling.original_context
    return float(theta * (scaling.factor * stretch - (scaling.factor - 1)) ** (d / (d - 2)))


def _scaled(frequencies: Tensor, scaling: RopeScaling, theta: float, length: int) -> Tensor:
    """Slow the frequencies, (d / 2) -> (d / 2); see RopeScaling."""
    if scaling.kind == "dynamic":
        return frequencies  # theta has it
    if scaling.kind == "longrope":
        is_long = length > scaling.original_context
        each = frequencies.new_tensor(scaling.long_factor if is_long else scaling.short_factor)
        return frequencies / each  # (d / 2,)
    slow = frequencies / scaling.factor  # (d / 2,)
    if scaling.kind == "linear":
        return slow
    if scaling.kind == "yarn":
        keep = _kept(frequencies, scaling, theta)  # (d / 2,)
    else:
        # How often a pair turns within the context of the first training: seldom (1), often (4).
        turns = scaling.original_context * frequencies / (2 * math.pi)  # (d / 2,)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # (d / 2,)
    return torch.lerp(slow, frequencies, keep)  # (d / 2,)


def _kept(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Yarn: how much of each frequency is kept, (d / 2) -> (d / 2).

    All of the pairs that turn beta_fast times or more in the first context, none of those that
    turn beta_slow times or fewer, less and less of the pairs between.
    """
    d = 2 * frequencies.shape[0]

    def pair(turns: float) -> float:
        """Where the pair stands that turns so often: theta^(-2 i / d) context = 2 pi turns."""
        wavelengths = scaling.original_context / (2 * math.pi * turns)
        return d * math.log(wavelengths) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    if first == last:
        last += 0.001  # a step, where there is nothing between
    at = torch.arange(d // 2, device=frequencies.device, dtype=torch.float32)  # (d / 2,)
    return 1 - ((at - first) / (last - first)).clamp(0, 1)  # (d / 2,)


def _size(scaling: RopeScaling) -> float:
    """What queries and keys are multiplied with: attention that is the sharper, the longer."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind not in ("yarn", "longrope") or scaling.factor <= 1:
        return 1.0
    growth = math.log(scaling.factor)
    if scaling.kind == "longrope":
        return math.sqrt(1 + growth / math.log(scaling.original_context))
    if scaling.mscale and scaling.mscale_all_dim:
        return (0.1 * scaling.mscale * growth + 1) / (0.1 * scaling.mscale_all_dim * growth + 1)
    return 0.1 * growth + 1
