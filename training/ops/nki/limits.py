"""Sizes that the hardware and the kernels fix; the hardware's are as NKI documents them."""

from __future__ import annotations

PARTITIONS = 128
"""Maximum rows of a tile in SBUF or PSUM (nl.tile_size.pmax), and terms of a product's sums."""

STATIONARY = 128
"""Maximum columns of the operand that a product holds (nl.tile_size.gemm_stationary_fmax)."""

MOVING = 512
"""Maximum columns of the operand that streams through (nl.tile_size.gemm_moving_fmax)."""

PSUM_COLUMNS = 512
"""Maximum float32 columns of a tile in PSUM, one bank (nl.tile_size.psum_fmax)."""

CHUNK = PARTITIONS
"""Steps of a chunk of SSD: one per partition."""

STATE = PARTITIONS
"""State size n of SSD: B and C of a chunk are square, and fill the tensor engine."""

GROUP_CHANNELS = 16384
"""Maximum channels of a group of heads: the group's state is one tile of 64 KiB per partition."""

TIME = 512
"""Maximum steps of a tile of the convolution."""
