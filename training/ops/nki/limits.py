"""Sizes that the hardware and the kernels fix. Those of the hardware are NKI's documented ones."""

from __future__ import annotations

PARTITIONS = 128
"""Most rows of a tile in SBUF or PSUM (nl.tile_size.pmax), and most terms of one product's sums."""

STATIONARY = 128
"""Most columns of the operand that a product holds in place (nl.tile_size.gemm_stationary_fmax)."""

MOVING = 512
"""Most columns of the operand that streams through (nl.tile_size.gemm_moving_fmax)."""

PSUM_COLUMNS = 512
"""Most float32 columns of a tile in PSUM, one bank (nl.tile_size.psum_fmax)."""

CHUNK = PARTITIONS
"""Steps of a chunk of SSD: one step a partition."""

STATE = PARTITIONS
"""State size n of SSD: B and C of a chunk are square, and fill the tensor engine."""

GROUP_CHANNELS = 16384
"""Most channels of a group of heads: the state of the group is one tile of 64 KiB a partition."""

TIME = 512
"""Most steps of a tile of the convolution."""
