"""Rotary positions: each pair of a head's channels is rotated by an angle proportional to position.

Su et al. 2021 ("RoFormer"), section 3.2.2: at position p, pair i rotates by p * theta^(-2 i / d).
Channel i is paired with channel i + d / 2, as in Hugging Face checkpoints (the paper pairs
neighbors), so each position's angles appear twice.

Shapes: b batch, l length, h heads, d channels of a head, r rotated channels.
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
    """Return cosine and sine of every position's angles, (l), d -> (l, d) both, always float32.

    Positions (b, l), restarting with each document, give (b, l, d). d is even. length: positions
    of the text so far, which some kinds of scaling depend on. In bfloat16, positions above 256
    could not be distinguished from their neighbors.
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
    """Rotate the first r channels of every head, (b, l, h, d) -> (b, l, h, d), r <= d.

    cos, sin (l, r) or (b, l, r). Computed in float32 (float64 for float64 inputs); the result has
    x's dtype.
    """
    d, r = x.shape[-1], cos.shape[-1]
    if r == 0:
        return x
    turned, rest = x.split([r, d - r], dim=-1)  # (b, l, h, r), (b, l, h, d - r)
    first, second = turned.chunk(2, dim=-1)  # (b, l, h, r / 2) twice
    across = torch.cat((-second, first), dim=-1)  # (b, l, h, r)
    # cos and sin are float32, so products with anything narrower are too.
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (l, 1, r) or (b, l, 1, r)
    turned = (turned * cos + across * sin).to(x.dtype)  # (b, l, h, r)
    return turned if r == d else torch.cat((turned, rest), dim=-1)  # (b, l, h, d)


def _raised(theta: float, d: int, scaling: RopeScaling, length: int) -> float:
    """Return dynamic scaling's theta for this length; unchanged up to the original context."""
    stretch = max(length, scaling.original_context) / scaling.original_context
    return float(theta * (scaling.factor * stretch - (scaling.factor - 1)) ** (d / (d - 2)))


def _scaled(frequencies: Tensor, scaling: RopeScaling, theta: float, length: int) -> Tensor:
    """Slow down the frequencies, (d / 2) -> (d / 2); see RopeScaling."""
    if scaling.kind == "dynamic":
        return frequencies  # theta already includes the scaling
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
        # Turns of a pair within the original context: few (1), many (4).
        turns = scaling.original_context * frequencies / (2 * math.pi)  # (d / 2,)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # (d / 2,)
    return torch.lerp(slow, frequencies, keep)  # (d / 2,)


def _kept(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Return how much of each frequency yarn keeps, (d / 2) -> (d / 2).

    All of those that turn beta_fast times or more within the original context, none of those that
    turn beta_slow times or fewer, with a linear ramp between.
    """
    d = 2 * frequencies.shape[0]

    def pair(turns: float) -> float:
        """Return which pair turns this often: theta^(-2 i / d) context = 2 pi turns."""
        wavelengths = scaling.original_context / (2 * math.pi * turns)
        return d * math.log(wavelengths) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    if first == last:
        last += 0.001  # a step, as nothing lies between
    at = torch.arange(d // 2, device=frequencies.device, dtype=torch.float32)  # (d / 2,)
    return 1 - ((at - first) / (last - first)).clamp(0, 1)  # (d / 2,)


def _size(scaling: RopeScaling) -> float:
    """Return the factor on queries and keys: longer contexts need sharper attention."""
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
