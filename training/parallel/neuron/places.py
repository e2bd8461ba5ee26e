"""Where a rank's part of a parameter lies in the parameter of the whole model.

A rank has its own heads. It therefore has rows of in_proj for z, for x, B and C, and for dt, which
are three parameters here but one in the whole model; and the convolution's rows for x, B and C.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from training.models.sizes import Mamba2Config
from training.parallel.share import Share
from training.parallel.tensor import MixerRows

_PER_HEAD = ("dt_bias", "A_log", "D")
_VOCABULARY = ("embeddings", "lm_head")


@dataclass(frozen=True)
class Place:
    """A part that consists of these slices of one dimension of the parameter `name`, in order.

    slices of None: every rank has the whole.
    """

    name: str
    dim: int = 0
    slices: tuple[slice, ...] | None = None

    def of(self, whole: Tensor) -> Tensor:
        """Cut the part out of the parameter of the whole model."""
        if self.slices is None:
            return whole
        parts = [whole.narrow(self.dim, one.start, one.stop - one.start) for one in self.slices]
        return torch.cat(parts, self.dim)  # (..., their lengths, ...)

    def boxes(self, rows: Tensor, first: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield the boxes of the whole that some rows of the part, from row `first` on, make up.

        Each is its offsets in the whole model's parameter, and a view of the rows.
        """
        if self.slices is None or self.dim == 1:
            begin = 0 if self.slices is None else self.slices[0].start
            offsets = (first, begin, *[0] * rows.dim())[: rows.dim()]
            if len(rows):
                yield offsets, rows
            return
        at = 0  # where a slice begins in the part
        for one in self.slices:
            length = one.stop - one.start
            low, high = max(first, at), min(first + len(rows), at + length)
            if low < high:
                offsets = (one.start + low - at, *[0] * (rows.dim() - 1))
                yield offsets, rows[low - first : high - first]
            at += length


def place(name: str, sizes: Mamba2Config, share: Share) -> Place:
    """Return where a rank's parameter lies, by its name."""
    owner, _, kind = name.rpartition(".")
    before, _, module = owner.rpartition(".")
    rows, inner = MixerRows(sizes, share), share.own(sizes.d_inner)
    z, *xBC, dt = rows.all  # noqa: N806  (the paper's own names)
    if module in ("in_proj_z", "in_proj_xBC", "in_proj_dt"):
        slices = {"in_proj_z": (z,), "in_proj_xBC": tuple(xBC), "in_proj_dt": (dt,)}[module]
        return Place(f"{before}.in_proj.{kind}", 0, slices)
    if module == "conv1d":
        return Place(name, 0, tuple(rows.conv))
    if kind in _PER_HEAD:
        return Place(name, 0, (share.own(sizes.n_head),))
    if module == "norm" and before.endswith("mixer"):
        return Place(name, 0, (inner,))
    if module == "out_proj" and kind == "weight":
        return Place(name, 1, (inner,))
    if module in _VOCABULARY:
        return Place(name, 0, (share.own(sizes.vocab_size),))
    return Place(name)
