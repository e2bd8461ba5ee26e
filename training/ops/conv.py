"""Causal depthwise convolution over time: each channel sees itself and its last steps."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y[t] = bias + sum over j of weight[j] x[t - (k - 1) + j], zeros before the start.

    x (b, l, d); weight (d, 1, k) as nn.Conv1d holds it; bias (d). A sum of k shifted products:
    it keeps the channels contiguous, which a depthwise nn.Conv1d on (b, d, l) does not.
    """
    length, taps = x.shape[1], weight.shape[-1]
    padded = F.pad(x, (0, 0, taps - 1, 0))  # (b, k - 1 + l, d)
    y = padded[:, :length] * weight[:, 0, 0]  # (b, l, d)
    for j in range(1, taps):
        y = y + padded[:, j : j + length] * weight[:, 0, j]  # (b, l, d)
    return y if bias is None else y + bias  # (b, l, d)
