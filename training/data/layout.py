"""The words of packed tokens: 32 bits, little-endian, each a token, its position, its loss bit.

A word (bit 31 zero) holds the token's id in its lowest bits, above it the token's position in its
document, and in bit 30 whether the token counts as a target. LAYOUTS has the numbers of bits for
ids and positions. No torch here.

Shapes: n tokens of a document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORD = np.dtype("<i4")
LOSS_BIT = 30
SIZE = ".size"
"""Suffix of the file beside a packed file that holds its number of tokens."""


@dataclass(frozen=True)
class Layout:
    """How many bits of a word hold the id, from bit 0 up, and how many the position above it."""

    token_bits: int
    position_bits: int

    @property
    def vocabulary(self) -> int:
        return 1 << self.token_bits

    @property
    def positions(self) -> int:
        return 1 << self.position_bits


LAYOUTS = {"16/14": Layout(16, 14), "17/13": Layout(17, 13)}


def words_of(ids: NDArray[Any], layout: Layout, counts: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Make the words (n,) of a document that fits the layout: ids (n,), and which count (n,)."""
    positions = np.arange(len(ids)) << layout.token_bits  # (n,)
    words = ids.astype(np.int64) | positions | counts.astype(np.int64) << LOSS_BIT  # (n,)
    return words.astype(WORD)  # (n,)


def pieces_of(ids: NDArray[Any], layout: Layout) -> Iterator[NDArray[np.int32]]:
    """Yield the words of a document of any length, all of whose tokens are targets.

    A document that is longer than the layout has positions is cut into several.
    """
    for begin in range(0, len(ids), layout.positions):
        piece = ids[begin : begin + layout.positions]  # (up to positions,)
        yield words_of(piece, layout, np.ones(len(piece), bool))


def begins_in(words: NDArray[np.int32], layout: Layout) -> int:
    """Count the documents that begin in words (n,), which is where positions are 0."""
    positions = words >> layout.token_bits & (layout.positions - 1)  # (n,)
    return int((positions == 0).sum())
