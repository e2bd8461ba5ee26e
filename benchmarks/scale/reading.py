"""What training reads of packed files by memory maps: bytes and opens.

Samples lie `sample` bytes after each other and are read in a shuffled order. The kernel reads a
window of `ahead` bytes around what is touched, if it is not in the node's memory yet.
"""

from __future__ import annotations

import numpy as np


def tokens_a_second(parameters: float, gpus: float, peak: float, mfu: float) -> float:
    """Give a node's tokens/s: 6 FLOP a parameter and token."""
    return gpus * peak * mfu / (6 * parameters)


def windows_read(total: float, ahead: float, samples: int) -> float:
    """Give the bytes that a node reads for its first `samples` of a set of `total` bytes.

    Of w windows, a sample finds its own read by one of k before it with 1 - (1 - 1 / w) ^ k.
    """
    windows = total / ahead
    return ahead * windows * -np.expm1(samples * np.log1p(-1 / windows))


def simulate(total: int, ahead: int, sample: int, samples: int, random: np.random.Generator) -> int:
    """Draw the samples and count the windows that they touch; bytes."""
    drawn = random.choice(total // sample, samples, replace=False) * sample
    return len(np.unique(np.concatenate([drawn // ahead, (drawn + sample - 1) // ahead]))) * ahead


def opened_anew(samples: float, files: int, kept: float) -> float:
    """Give the share of `samples` whose file is to be opened, once `kept` of the files are open.

    The file of a sample in a shuffled order is one of those with kept / files, whatever is kept.
    """
    return samples * max(0.0, 1 - kept / files)
